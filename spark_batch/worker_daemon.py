"""The daemon that Spark forks Python workers from, with everything imported that a pass needs.

Idle workers end after a minute, so that nearly every pass starts new ones: a fork is milliseconds,
the imports are most of a second. Imports only: a channel of gRPC would not survive the fork.
"""

import pyspark.sql.pandas.serializers
import pyspark.sql.worker  # noqa: F401
from pyspark.daemon import manager

import spark_batch.passes.applier
import spark_batch.passes.table_reader  # noqa: F401

if __name__ == "__main__":
    manager()
