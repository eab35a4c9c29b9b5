"""The daemon that Spark forks Python workers from, with all imports of a pass done.

Idle workers end after a minute, so nearly every pass starts new ones: a fork takes milliseconds,
the imports most of a second. It only imports: a gRPC channel would not survive the fork.
"""

import pyspark.sql.pandas.serializers
import pyspark.sql.worker  # noqa: F401
from pyspark.daemon import manager

import spark_batch.passes.applier
import spark_batch.passes.table_reader  # noqa: F401

if __name__ == "__main__":
    manager()
