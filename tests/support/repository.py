"""Where the repository is: for what tests read of it, and where they start its programs."""

from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
