"""The engine on Redis or Valkey, against real servers."""
