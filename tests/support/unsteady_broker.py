"""A broker that does not become healthy while the file `hang` is in the data directory."""

import os
import runpy
import signal
from pathlib import Path

if __name__ == "__main__":
    if (Path(os.environ["TIDEMARK_STORAGE_DATA_DIR"]) / "hang").exists():  # noqa: TID251
        signal.pause()
    runpy.run_module("broker_svc", run_name="__main__")
