"""Clients without a library of ours, in other languages. Not part of `make test`."""
