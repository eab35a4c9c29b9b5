"""The environment of this process: the only module that reads it."""

import os
from collections.abc import Mapping
from typing import Final

_WITHOUT_EVENT_ENGINE: Final = "-event_engine_client,-event_engine_listener"


def given_or_own(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """The given environment, or else the current one of the process."""
    return os.environ if environ is None else environ


def keep_grpc_out_of_forks() -> None:
    """Call it before the first use of gRPC, in a process that forks to start other programs.

    gRPC tries to carry its threads over a fork, which has been seen to end the child before its
    exec.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def turn_off_grpc_event_engine() -> None:
    """Call it before gRPC is imported, in the process of a service.

    The event engine passes what arrives from thread to thread, four times until the event loop has
    it; without it, one thread reads and wakes the event loop (ADR 46).
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", _WITHOUT_EVENT_ENGINE)
