"""Tests of whole clusters: real processes, real ports, real files."""
