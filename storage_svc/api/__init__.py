"""The gRPC services of storage and the codec between protos and operations."""
