"""The registry on a real Valkey server."""
