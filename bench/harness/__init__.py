"""Shared by all benchmarks: rounds, figures, bars, reports, and the systems under test."""
