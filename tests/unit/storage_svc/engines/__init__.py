"""Keys, rows and formats, and how RocksDB fails."""
