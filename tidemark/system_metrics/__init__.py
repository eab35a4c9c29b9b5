"""Key figures of a service, sampled and stored as `system_metrics` rows (R12)."""
