"""Benchmarks: `python -m bench NAME`. Ratios within one run on one machine, never across runs.

One module per benchmark; `bench.frame` is what they share. They use services and clients from the
outside, as users do.
"""
