"""Retention on a real local Spark."""
