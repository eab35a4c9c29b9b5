"""Connections, sessions and unary calls to brokers, and their encoding."""
