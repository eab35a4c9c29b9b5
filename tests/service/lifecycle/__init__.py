"""Sweeps over real gRPC: storage, broker and lifecycle under one manual clock."""
