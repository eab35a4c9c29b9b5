"""Publishing: publishers, and the path of a run to its partition."""
