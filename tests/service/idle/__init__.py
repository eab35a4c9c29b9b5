"""Idle queues: activity leases, cleanup, and waking up."""
