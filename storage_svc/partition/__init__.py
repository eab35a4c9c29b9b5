"""A partition: one writer, its commits, counters, clock, health and topics."""
