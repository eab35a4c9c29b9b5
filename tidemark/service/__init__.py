"""The life of a service process: start, signals, memory, end."""
