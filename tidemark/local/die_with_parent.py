"""A script that ties a child to its parent and then becomes a Python module.

`python die_with_parent.py PARENT_PID MODULE [ARGUMENT ...]`: when the parent dies, even by
`kill -9`, the kernel kills this process as well. It uses only the standard library and then execs
`python -m MODULE`, which is all that `ps` shows.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    if sys.platform == "linux":  # other systems have no equivalent
        # Survives exec. Set here and not in a preexec_fn, which may deadlock beside gRPC's threads.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            sys.exit("the parent died before the child started")
    os.execv(sys.executable, [sys.executable, "-m", *command])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
