"""Storage over real gRPC: the exchange, its owners, topics and queues, sweeps and retention."""
