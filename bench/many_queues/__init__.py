"""Benchmark `many-queues`: one message to each of many queues, beside Valkey Streams."""
