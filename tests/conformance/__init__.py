"""One suite for every engine: what a partition relies on, whichever store it lives in."""
