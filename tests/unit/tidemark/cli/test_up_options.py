"""Options of `tidemark up` that are refused before anything starts."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemark.cli.main import app


def test_a_wrong_url_of_a_registry_is_refused_without_showing_it(tmp_path: Path) -> None:
    """S8: it may hold a password."""
    arguments = ["up", "--data-dir", str(tmp_path / "data"), "--registry", "http://:secret@host"]

    ended = CliRunner().invoke(app, arguments)

    assert ended.exit_code == 2
    assert "--registry must be redis://" in ended.output
    assert "secret" not in ended.output
    assert not (tmp_path / "data").exists()


def test_several_storage_nodes_on_redis_are_refused(tmp_path: Path) -> None:
    """S9: they would take the partitions from each other."""
    arguments = ["up", "--data-dir", str(tmp_path / "data"), "--engine", "redis", "--storages", "2"]

    ended = CliRunner().invoke(app, arguments)

    assert ended.exit_code == 2
    assert "--engine redis with several --storages needs --registry" in ended.output
    assert not (tmp_path / "data").exists()


def test_servers_are_refused_without_the_engine_that_uses_them(tmp_path: Path) -> None:
    """S9: the data would quietly go to the data directory."""
    url = "redis://:secret@127.0.0.1:6379"
    arguments = ["up", "--data-dir", str(tmp_path / "data"), "--redis-url", url]

    ended = CliRunner().invoke(app, arguments)

    assert ended.exit_code == 2
    assert "--redis-url needs --engine redis" in ended.output
    assert "secret" not in ended.output
    assert not (tmp_path / "data").exists()


def test_replicas_are_not_expected_of_the_valkey_that_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S9: its partitions would stay FAULTY."""
    monkeypatch.setenv("TIDEMARK_REDIS_DURABILITY", "replicated")
    arguments = ["up", "--data-dir", str(tmp_path / "data"), "--engine", "redis"]

    ended = CliRunner().invoke(app, arguments)

    assert ended.exit_code == 2
    assert "TIDEMARK_REDIS_DURABILITY=replicated needs --redis-url" in ended.output
    assert not (tmp_path / "data").exists()


def test_what_the_services_are_given_is_not_asked_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S6: the engine is an option of `up`, and the addresses may be those of another cluster."""
    monkeypatch.setenv("TIDEMARK_STORAGE_ENGINE", "redis")
    monkeypatch.setenv("TIDEMARK_STORAGE_ADDRESSES", "one:7410,two:7410")
    (tmp_path / "file").touch()

    ended = CliRunner().invoke(app, ["up", "--data-dir", str(tmp_path / "file" / "data")])

    assert ended.exit_code == 2
    assert "cannot use data directory" in ended.output
