"""The identity of a process, unique among all processes of its service and across restarts."""

import os
import socket
from uuid import uuid4


def process_identity() -> str:
    """Host, process id and a random part: in containers the process id is always the same."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid4().hex[:8]}"
