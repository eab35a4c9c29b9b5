"""The storage side of lifecycle: sweep lease, wake-ups, announcements."""
