"""One module per command of `tidemark`."""
