"""Several storage nodes over real gRPC: where partitions are, and nodes that are away."""
