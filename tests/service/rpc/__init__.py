"""The RPC layer that all services share."""
