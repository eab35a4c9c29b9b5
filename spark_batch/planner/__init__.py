"""The planner: Spark in a child process of the scheduler, which runs while there is work (P4)."""
