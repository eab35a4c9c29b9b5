"""Reads beside the writer: queues, due work and Arrow tables."""
