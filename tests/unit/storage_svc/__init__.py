"""Parts of storage without a connection."""
