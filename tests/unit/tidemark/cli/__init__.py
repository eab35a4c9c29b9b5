"""Parts of the command line without a cluster."""
