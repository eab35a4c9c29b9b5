"""Where the repository is: for what tests read of it, and where they start its programs."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]


def documented_metrics() -> list[str]:
    """The names of metrics in the tables of the operations manual."""
    text = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")
    return re.findall(r"^\| `(tidemark\.[a-z_.]+)` \|", text, re.MULTILINE)
