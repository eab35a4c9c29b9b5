"""The broker service: what clients talk to. Keeps nothing that must survive a restart."""
