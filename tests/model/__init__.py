"""Every engine against one suite, a partition against its model, and histories of a cluster."""
