"""Benchmark `tracing`: the cost of tracing at default sampling."""
