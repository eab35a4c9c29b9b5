"""Connections, sessions and unary calls to brokers, and the encoding of what they carry."""
