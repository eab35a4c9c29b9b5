"""Benchmark `storage`: appends and idle queues in storage."""
