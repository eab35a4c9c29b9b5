"""Placement: which storage node holds which partition, and which one creates it."""
