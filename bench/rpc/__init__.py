"""Benchmark `rpc`: the cost of an empty call through one and two hops."""
