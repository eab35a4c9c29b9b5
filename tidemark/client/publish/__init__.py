"""Publishing: publishers, batching and the publish buffer."""
