"""Retention and eviction on PySpark: reads tables from storage, plans, and applies over gRPC."""
