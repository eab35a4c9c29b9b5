"""What docs/OPERATIONS.md says about settings is what the chart does."""

import re

from tests.support.chart_rendering import NAME, container, environment, pods, render
from tests.support.chart_value_sets import LOADS
from tests.support.repository import ROOT

OPERATIONS = (ROOT / "docs" / "OPERATIONS.md").read_text(encoding="utf-8")


def test_the_table_of_two_loads_shows_what_their_files_set() -> None:
    """R7."""
    rows = re.findall(
        r"^\| `(TIDEMARK_\w+)` \| ([\d ]+)(?: ms)? \| [^|]+ \| ([\d ]+)(?: ms)? \|$",
        OPERATIONS,
        re.MULTILINE,
    )
    shown = {
        load: {name: figures[column].replace(" ", "") for name, *figures in rows}
        for column, load in enumerate(("high-throughput", "low-load"))
    }

    for load, values in LOADS.items():
        retention = dict(pods(render(values)))[f"Deployment/{NAME}-retention"]
        variables = environment(container(retention))
        assert len(shown[load]) == 4
        assert shown[load].items() <= variables.items()


def test_every_file_and_section_that_is_named_exists() -> None:
    sections = {
        re.sub(r"[^a-z0-9 -]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", OPERATIONS, re.MULTILINE)
    }

    for link in re.findall(r"\]\(([^)]+)\)", OPERATIONS):
        name, _, section = link.partition("#")
        assert (ROOT / "docs" / name).exists() if name else section in sections, link
    for path in re.findall(r"`(helm/[^`]+)`", OPERATIONS):
        assert (ROOT / path).exists(), path
