"""What tells a process from every other one of its service, now and over restarts."""

import os
import socket
from uuid import uuid4


def process_identity() -> str:
    """Host, process and a random part: in a container every process has the same id."""
    return f"{socket.gethostname()[:64]}-{os.getpid()}-{uuid4().hex[:8]}"
