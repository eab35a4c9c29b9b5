"""A pass: read tables, plan by the rules, apply the plan from the executors (R1-R9)."""
