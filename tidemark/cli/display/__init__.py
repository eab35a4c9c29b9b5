"""Text for people and programs: tables, units, safe payloads, the terminal."""
