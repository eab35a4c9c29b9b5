"""Engines: the ordered key-value stores a partition can live in, behind one protocol."""
