"""The query of docs/RETENTION.md, as a program for one storage service."""

import re

from tests.support.repository import ROOT

RETENTION_MD = ROOT / "docs" / "RETENTION.md"
_ADDRESS = "127.0.0.1:7410"


def documented_query(address: str) -> str:
    """The snippet as it stands there, with the address of a service."""
    (snippet,) = re.findall(r"```python\n(.*?)```", RETENTION_MD.read_text("utf-8"), re.DOTALL)
    assert _ADDRESS in snippet
    changed: str = snippet.replace(_ADDRESS, address)
    return changed
