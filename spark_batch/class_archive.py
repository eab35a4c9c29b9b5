"""The class archive: Spark's classes as Java has parsed and checked them, in one file.

Loading classes is half of the work of Java when Spark starts. The program `python -m
spark_batch.class_archive` writes them once, for the environment that it runs in (class data
sharing); sessions that `session.py` starts then map them from the file. Another Java, or another
Spark, starts as without it.
"""

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tidemark.settings import RetentionSettings, load_or_exit

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

ARCHIVE: Final = Path(sys.prefix) / "share" / "tidemark" / "spark.jsa"
"""Beside the environment, and removed with it. About 160 MB."""

_WRITE_S_MAX: Final = 600
_QUIET: Final = "-Xlog:cds=off -Xlog:cds+dynamic=off"
"""Java names each class that cannot be archived, and why it does not use an archive."""


def options_with(archive: Path = ARCHIVE) -> str:
    """The options of Java for using an archive; empty if there is none, or not all of it.

    Java checks whom it was written for, and crashes where a part of the file is missing.
    """
    try:
        is_whole = archive.stat().st_size == int(_size_of(archive).read_text())
    except (OSError, ValueError):
        is_whole = False
    return f'"-XX:SharedArchiveFile={archive}" {_QUIET}' if is_whole else ""


def _size_of(archive: Path) -> Path:
    """The file that holds the size of an archive."""
    return archive.with_suffix(".size")


def write(settings: RetentionSettings, archive: Path = ARCHIVE) -> None:
    """Start Spark, run the steps of a pass, and write the classes that it has loaded."""
    from spark_batch.session import JAVA_OPTIONS, start_session

    archive.parent.mkdir(parents=True, exist_ok=True)
    unfinished = archive.with_suffix(".unfinished")
    unfinished.unlink(missing_ok=True)
    writing = f'{JAVA_OPTIONS} "-XX:ArchiveClassesAtExit={unfinished}" {_QUIET}'
    spark = start_session(settings, {"spark.driver.extraJavaOptions": writing})
    java = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
    _work(spark)
    spark.stop()
    java.stdin.close()  # it ends then, and writes
    java.wait(_WRITE_S_MAX)
    with unfinished.open("rb") as written:
        os.fsync(written.fileno())
    size = unfinished.stat().st_size
    unfinished.replace(archive)
    _size_of(archive).write_text(str(size))


def _work(spark: "SparkSession") -> None:
    """The work that loads all classes which passes and reports need."""
    from pyspark.sql import functions as F  # noqa: N812 - the customary name

    rows = spark.range(0, 2, 1, 1).mapInArrow(_as_they_are, "id bigint")
    named = rows.select("id", F.lit("x").alias("name"), F.timestamp_millis("id").alias("time"))
    named.where(F.col("id") >= 0).mapInArrow(_as_they_are, named.schema).collect()
    named.groupBy("name").agg(F.sum("id")).orderBy("name").collect()


def _as_they_are(batches: "Iterable[pa.RecordBatch]") -> "Iterator[pa.RecordBatch]":
    yield from batches


if __name__ == "__main__":
    write(load_or_exit(RetentionSettings))
