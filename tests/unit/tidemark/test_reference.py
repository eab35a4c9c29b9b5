"""The generated pages: complete, and as fresh as the code."""

from pathlib import Path

import pytest

from tidemark import errors
from tidemark.reference import all_limits, config_page, errors_page, main
from tidemark.settings import SERVICES


def test_the_committed_pages_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["--check"])

    assert (status, capsys.readouterr().err) == (0, "")


def test_every_reason_is_on_the_page_of_errors() -> None:
    """S3: every reason is documented."""
    page = errors_page()

    for error in errors.ALL:
        assert f"| `{error.reason}` | {error.code.name} |" in page


def test_every_variable_and_limit_is_on_the_page_of_settings() -> None:
    """S3: every limit is documented."""
    page = config_page()

    for service in SERVICES:
        for variable in service.variables():
            assert f"| `{variable.name}` |" in page
    for limit in all_limits():
        assert f"| `{limit.name}` | {limit.value:,}" in page


def test_a_stale_page_is_named_and_then_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    docs = ["--docs", str(tmp_path / "docs")]
    assert main(docs) == 0
    assert main([*docs, "--check"]) == 0
    page = tmp_path / "docs" / "CONFIG.md"
    page.write_text("something else")
    capsys.readouterr()

    status = main([*docs, "--check"])

    said = capsys.readouterr().err
    assert status == 1
    assert "CONFIG.md is stale" in said
    assert "ERRORS.md" not in said
    assert page.read_text() == "something else"

    assert main(docs) == 0
    assert page.read_text() == config_page()
