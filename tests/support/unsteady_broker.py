"""A broker that does not become healthy while the file that its environment names exists."""

import os
import runpy
import signal
from pathlib import Path

HANGS_WHILE = "TEST_HANGS_WHILE"

if __name__ == "__main__":
    if Path(os.environ[HANGS_WHILE]).exists():  # noqa: TID251
        signal.pause()
    runpy.run_module("broker_svc", run_name="__main__")
