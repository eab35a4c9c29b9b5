"""The Spark session of the jobs, and its configuration.

The jobs run in any session, on one machine (`local[*]`) and on a cluster. A session that exists,
and the configuration that `spark-submit` gave, are respected; the options here are the defaults of
a session that this module starts itself.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from spark_batch import class_archive
from tidemark.local.java import find_java_home, why_no_spark
from tidemark.settings import RetentionSettings
from tidemark.settings.variables import split_pairs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


JAVA_OPTIONS: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Spark runs for minutes at a time, and tasks work in Python: otherwise Java spends half of the
processor time of a start on optimizing its own classes (docs/adr/0020)."""

DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
        # A pass that runs long must not delay another one; each has its pool.
        "spark.scheduler.mode": "FAIR",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        "spark.python.daemon.module": "spark_batch.worker_daemon",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        "spark.driver.extraJavaOptions": f"{JAVA_OPTIONS} {class_archive.options_with()}".rstrip(),
    }
)
"""Options of a session that this module starts, unless the settings have others."""

BRIEF: Final[Mapping[str, str]] = MappingProxyType(
    {
        "spark.sql.codegen.wholeStage": "false",
        "spark.ui.showConsoleProgress": "false",
    }
)
"""Options of a session for a few small jobs, which spends most of its time starting."""

_SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"
"""The variable in which `spark-submit` passes the port of its Java to a Python program."""

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class SparkMissing(RuntimeError):
    """PySpark or Java is missing. The text is one line, for operators."""


def start_session(
    settings: RetentionSettings, options: Mapping[str, str] = _NOTHING
) -> "SparkSession":
    """The session of this process, started if there is none; takes some seconds.

    Options in the settings override those given here. Raises SparkMissing.
    """
    environment = os.environ  # noqa: TID251 - passed on to Spark, and read as Spark wrote it
    if _SUBMITTED not in environment:
        missing = why_no_spark(settings.java_home)
        if missing:
            raise SparkMissing(missing)
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        # A builder would change the configuration of a session that others use.
        return SparkSession.getActiveSession() or SparkSession(SparkContext.getOrCreate())
    explicit = split_pairs(settings.spark_options)
    if _SUBMITTED in environment:
        return _submitted(explicit)
    # Spark's scripts and workers read these variables.
    environment["JAVA_HOME"] = str(find_java_home(settings.java_home))
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    # A Java that only computes the command line of the other one, in a second.
    environment.setdefault("SPARK_LAUNCHER_OPTS", JAVA_OPTIONS)
    Thread(target=_import_early, daemon=True).start()
    builder = SparkSession.builder.appName("tidemark").master(settings.spark_master)
    for key, value in {**DEFAULTS, **options, **explicit}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _submitted(explicit: Mapping[str, str]) -> "SparkSession":
    """A session of the Java that `spark-submit` started: its master, name and configuration.

    The defaults that a running session accepts are set where the submission has no value.
    """
    from pyspark.sql import SparkSession

    builder = SparkSession.builder
    for key, value in explicit.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    given = spark.sparkContext.getConf()
    for key, value in DEFAULTS.items():
        if key.startswith("spark.sql.") and not given.contains(key):
            spark.conf.set(key, value)
    return spark


def _import_early() -> None:
    """While Java starts, import modules that PySpark needs on its first call, such as pandas."""
    with suppress(ImportError):  # where another version has no use for it
        import pyspark.testing.utils  # noqa: F401
