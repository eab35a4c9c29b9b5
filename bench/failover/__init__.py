"""Benchmarks of failovers: how long publishes wait for a broker, a storage node or a store."""
