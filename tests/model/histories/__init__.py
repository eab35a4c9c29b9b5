"""Random histories of exclusive queues, recorded and checked."""
