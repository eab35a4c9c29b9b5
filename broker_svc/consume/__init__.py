"""Consuming: consumers, the dispatcher, deliveries and settlements."""
