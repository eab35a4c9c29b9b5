"""Materialized queues: the handle cache and recovery from the engine."""
