"""The class archive: when sessions have Java use it. Writing one takes a start of Spark."""

from pathlib import Path

from spark_batch.class_archive import options_with


def test_an_archive_is_used_only_where_it_is_whole(tmp_path: Path) -> None:
    """P4: Java crashes with a part of one, and Spark would never start."""
    archive, size = tmp_path / "spark classes.jsa", tmp_path / "spark classes.size"
    missing = options_with(archive)
    archive.write_bytes(b"12345")
    unfinished = options_with(archive)
    size.write_text("5")
    whole = options_with(archive)
    archive.write_bytes(b"1234")
    cut = options_with(archive)
    size.write_text("")

    assert whole.startswith(f'"-XX:SharedArchiveFile={archive}" -Xlog:cds=off')
    assert [missing, unfinished, cut, options_with(archive)] == [""] * 4
