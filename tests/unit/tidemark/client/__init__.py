"""Parts of the SDK without a connection."""
