"""A part of benchmark `retention-cost`: what publishing pays for the index of ages."""
