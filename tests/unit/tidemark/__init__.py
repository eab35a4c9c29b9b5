"""The package that all services share."""
