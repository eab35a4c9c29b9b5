"""Consuming: subscriptions, deliveries, settlements and pulls."""
