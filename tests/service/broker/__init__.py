"""The broker over real gRPC: sessions, unary calls, delivery, topics and queues."""
