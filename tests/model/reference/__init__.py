"""The model of a partition; its modules bear the names of those of storage that they measure."""
