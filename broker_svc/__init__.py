"""The broker service: it serves clients and keeps nothing that must survive a restart."""
