"""The pure parts of the registry, and the static one."""
