"""Parts of the data source that need no Spark."""
