"""What tests of different kinds share: harnesses, clients, gates, waits."""
