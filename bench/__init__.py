"""Benchmarks: `python -m bench NAME`. They compare ratios within one run, never across runs.

`harness/` is shared. Benchmarks use services and clients from outside, as users do; to measure one
part alone, such as a partition, they call its public interface.
"""
