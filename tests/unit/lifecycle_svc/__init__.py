"""The plans of the sweepers."""
