"""Services in the process of the test, over real gRPC and a real RocksDB."""
