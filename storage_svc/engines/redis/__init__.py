"""The shared engine: partitions on a Redis or Valkey server, or on a cluster of them."""
