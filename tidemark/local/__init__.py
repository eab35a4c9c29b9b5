"""A cluster of processes on this machine: `tidemark up`, the tests and the benchmarks use it."""
