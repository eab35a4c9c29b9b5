"""The Spark session of the jobs, and its configuration.

The session is the same on one machine (`local[*]`) and on a cluster; only the master differs.
"""

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from threading import Thread
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from tidemark.local.java import find_java_home, why_no_spark
from tidemark.settings import RetentionSettings
from tidemark.settings.variables import split_pairs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


BRIEF: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Optimizing its own classes costs Java more time than a short job takes.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.sql.codegen.wholeStage": "false",
        "spark.ui.showConsoleProgress": "false",
    }
)
"""Options of a session for a few small jobs, which spends most of its time starting."""

_NOTHING: Final[Mapping[str, str]] = MappingProxyType({})


class SparkMissing(RuntimeError):
    """PySpark or Java is missing. The text is one line, for operators."""


def start_session(
    settings: RetentionSettings, options: Mapping[str, str] = _NOTHING
) -> "SparkSession":
    """Start Spark, or use the running session; takes some seconds. Raises SparkMissing.

    Options in the settings override those given here.
    """
    missing = why_no_spark(settings.java_home)
    if missing:
        raise SparkMissing(missing)
    from pyspark.sql import SparkSession

    # Spark's scripts and workers read these variables.
    environment = os.environ  # noqa: TID251 - passed on, not read
    environment["JAVA_HOME"] = str(find_java_home(settings.java_home))
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    # A Java that only computes the command line of the other one, in a second.
    environment.setdefault("SPARK_LAUNCHER_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
    Thread(target=_import_early, daemon=True).start()
    builder = SparkSession.builder.appName("tidemark").master(settings.spark_master)
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        "spark.python.daemon.module": "spark_batch.worker_daemon",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        **options,
        **split_pairs(settings.spark_options),
    }.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def _import_early() -> None:
    """Import what PySpark imports on its first call to Java, while Java starts: pandas with it."""
    with suppress(ImportError):  # where another version has no use for it
        import pyspark.testing.utils  # noqa: F401
