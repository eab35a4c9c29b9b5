"""The Spark session of the jobs: how it is started, and what it is told about Python and Java.

The same session serves one machine (`local[*]`) and a cluster; only its master differs.
"""

import os
import sys
from typing import TYPE_CHECKING

from tidemark.local.java import find_java_home, why_no_spark
from tidemark.settings import RetentionSettings
from tidemark.settings.variables import split_pairs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class SparkMissing(RuntimeError):
    """There is no PySpark or no Java. The text is one line, made for operators."""


def start_session(settings: RetentionSettings) -> "SparkSession":
    """Start Spark, or find it running; takes some seconds. Raises SparkMissing."""
    missing = why_no_spark(settings.java_home)
    if missing:
        raise SparkMissing(missing)
    from pyspark.sql import SparkSession

    from spark_batch.source import register

    # Spark's scripts and workers read these, and nothing else tells them.
    environment = os.environ  # noqa: TID251 - handed on, not read
    environment["JAVA_HOME"] = str(find_java_home(settings.java_home))
    environment.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName("tidemark").master(settings.spark_master)
    for key, value in {
        "spark.ui.enabled": "false",
        "spark.log.level": "WARN",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.shuffle.partitions": "4",
        "spark.python.daemon.module": "spark_batch.worker_daemon",
        "spark.sql.python.filterPushdown.enabled": "true",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        **split_pairs(settings.spark_options),
    }.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark
