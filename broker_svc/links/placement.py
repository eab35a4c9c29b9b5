"""Placement of topics."""

from typing import Final

TOPIC_HOME: Final = 0
"""The partition in which topics have their home."""
