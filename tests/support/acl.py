"""The user that docs/ENGINES.md tells operators to create."""

from typing import Any

from tests.support.repository import ROOT


def create_documented_user(server: Any, name: str, password: str) -> None:
    """By the command in the document, word for word but for the name and the password."""
    text = (ROOT / "docs/ENGINES.md").read_text()
    (command,) = [each for each in text.split("\n\n") if "ACL SETUSER tidemark" in each]
    words = command.replace("\\\n", " ").split()
    assert words[2:5] == ["tidemark", "on", ">PASSWORD"], words
    server.execute_command(*words[:2], name, "on", f">{password}", *words[5:])
