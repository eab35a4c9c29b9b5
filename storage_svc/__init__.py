"""The storage service: partitions, each a single writer over an ordered key-value engine."""
