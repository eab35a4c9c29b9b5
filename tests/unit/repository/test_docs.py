"""The documents: every link leads somewhere, and every file they name is there."""

import re
from functools import cache
from pathlib import Path

import pytest

from tests.support.repository import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_FENCES = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_LINKS = re.compile(r"\]\(([^)\s]+)\)")
_PATHS = re.compile(r"`([\w.-]+(?:/[\w.-]+)*/[\w.-]+\.(?:py|md|proto|lua|toml|yaml))`")


def prose(document: Path) -> str:
    """Without blocks of code."""
    return _FENCES.sub("", document.read_text(encoding="utf-8"))


@cache
def anchors(document: Path) -> set[str]:
    """What a link can name after its `#`, by the rules of GitHub."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", prose(document), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        number = 1
        anchor = slug
        while anchor in found:
            anchor = f"{slug}-{number}"
            number += 1
        found.add(anchor)
    return found


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(document: Path) -> None:
    """S6."""
    broken = []
    for link in _LINKS.findall(prose(document)):
        if re.match(r"https?:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (document.parent / path).resolve() if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)

    assert broken == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_heading_is_referred_to_by_a_link(document: Path) -> None:
    """S6: `[PAGE.md](PAGE.md) under "Heading"` could not be checked."""
    by_name = re.findall(r"\]\([^)#]*\.md\)[,;]?\s+(?:under|section|heading)\b", prose(document))

    assert by_name == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_file_that_is_named_is_there(document: Path) -> None:
    """Moved modules take their documents along."""
    named = set(_PATHS.findall(prose(document)))

    assert [path for path in sorted(named) if not any(_places(document, path))] == []


def _places(document: Path, path: str) -> list[Path]:
    """Where a named file may be: from the root, beside the document, in a package or in proto/."""
    found = [base / path for base in (ROOT, document.parent, ROOT / "proto", ROOT / "tidemark")]
    return [place for place in found if place.exists()]


def test_decisions_have_numbers_of_their_own_which_their_titles_repeat() -> None:
    """Two changes that are made side by side easily take the same number."""
    decisions = sorted((ROOT / "docs/adr").glob("*.md"))

    numbers = [int(each.name.partition("-")[0]) for each in decisions]

    assert numbers == list(range(1, len(decisions) + 1))
    for number, each in zip(numbers, decisions, strict=True):
        assert each.read_text().startswith(f"# {number}. ")
