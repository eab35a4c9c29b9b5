"""The Spark session of the jobs: a session that exists is used as it is (P1)."""

from pyspark.sql import SparkSession

from spark_batch.session import DEFAULTS, start_session
from tidemark.settings import RetentionSettings

SHUFFLE = "spark.sql.shuffle.partitions"


def test_a_session_that_exists_keeps_its_master_and_configuration(spark: SparkSession) -> None:
    """P1: the settings and the defaults of Tidemark are for a session that it starts itself."""
    own = {SHUFFLE: "77", "spark.sql.session.timeZone": "Asia/Tokyo"}
    before = {key: str(spark.conf.get(key)) for key in own}
    for key, value in own.items():
        spark.conf.set(key, value)
    try:
        settings = RetentionSettings(spark_master="local[1]", spark_options=f"{SHUFFLE}=3")
        used = start_session(settings)
        found = {key: used.conf.get(key) for key in own}
    finally:
        for key, value in before.items():
            spark.conf.set(key, value)

    assert own.keys() <= DEFAULTS.keys()
    assert found == own
    assert used.sparkContext is spark.sparkContext
    assert used.sparkContext.master == "local[2]"
