"""Exclusive queues over real gRPC."""
