"""The registry: which members of one kind are alive, and which of them holds each partition.

Shared by all services that divide the partitions among their processes. A registry grants nothing:
its assignments are hints with versions that only grow, and storage's epochs decide who may write. A
registry that is lost, late or wrong costs availability, never safety.
"""
