"""Subscriptions and exclusive queues: ownership, takeovers, eviction markers (requirement E)."""
