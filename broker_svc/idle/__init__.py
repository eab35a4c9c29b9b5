"""Idle queues: tracking, activity leases and cleanup (requirement I)."""
