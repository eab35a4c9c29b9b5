"""Benchmark `cycle`: publish, deliver and acknowledge with the SDK, beside Redis Streams."""
