"""The lifecycle service: sweeps partitions in two phases. Never writes to a partition."""
