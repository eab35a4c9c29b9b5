"""The quick form of every benchmark: it runs and reports. Only `make test-bench` runs them."""
