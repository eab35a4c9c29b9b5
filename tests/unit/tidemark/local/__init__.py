"""Helpers of a cluster on one machine."""
