"""The gRPC service of the retention scheduler."""
