"""The environment of this process: the only module that reads it.

Which variables there are, and what they mean, is the subject of the modules beside it.
"""

import os
from collections.abc import Mapping


def given_or_own(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    """What the caller hands in, or else the environment of the process as it is now."""
    return os.environ if environ is None else environ


def keep_grpc_out_of_forks() -> None:
    """Call it before gRPC is first used, in a process that forks to start other programs.

    gRPC tries to carry its threads over a fork. In a child that is only there to become another
    program, that has been seen to end it before it could.
    """
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
