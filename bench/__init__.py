"""Benchmarks: `python -m bench NAME`. Ratios within one run on one machine, never across runs.

`bench.frame` is what they share. They use services and clients from the outside, as users do;
where one part is measured alone, as a partition is, they call its public interface.
"""
