"""The pure rules of one queue."""
