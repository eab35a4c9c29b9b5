"""The lifecycle API. Sweeps are not built yet: every call answers UNIMPLEMENTED."""

from tidemark.api.lifecycle.v1.lifecycle_pb2_grpc import LifecycleServiceServicer


class LifecycleService(LifecycleServiceServicer):
    """One lifecycle replica."""
