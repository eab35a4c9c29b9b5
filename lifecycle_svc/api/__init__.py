"""The gRPC service of lifecycle."""
