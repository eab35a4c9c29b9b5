"""The rules of one queue: runs, lanes, groups and reservations, without I/O."""
