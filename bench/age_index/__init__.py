"""A part of benchmark `retention-cost`: the cost of the index of ages for publishing."""
