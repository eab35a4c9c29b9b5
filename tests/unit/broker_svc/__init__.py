"""Parts of the broker without a connection."""
