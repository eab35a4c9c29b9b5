"""Benchmark `sweep`: the cost, lateness and isolation of sweeps."""
