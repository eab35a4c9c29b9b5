"""The SDK against a real broker and a real storage, over real gRPC."""
