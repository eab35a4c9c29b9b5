"""The client-facing services: the only modules of the broker that see the protos of clients."""
