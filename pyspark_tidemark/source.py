"""The data source as Spark sees it: a name, a schema, and a reader for the options.

`spark.read.format("tidemark").option("storage", "host:port").option("table", "runs").load()`.
"""

import sys
from types import FrameType
from typing import Any, Final, NoReturn

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from pyspark_tidemark.options import ReadOptions, read_options
from pyspark_tidemark.reader import PushingReader, TidemarkReader
from pyspark_tidemark.tables import schema_of

NAME: Final = "tidemark"

_PUSHING_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class TidemarkSource(DataSource):
    """Options: see `docs/RETENTION.md`. Read-only, and only in batches."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType:
        chosen = self._chosen()
        return schema_of(chosen.shape, chosen.columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        chosen = self._chosen()
        kind = PushingReader if _pushes_filters() else TidemarkReader
        return kind(chosen.storage, chosen.table, schema.names, chosen.scan_filter)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return RefusingStreamReader()

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        _refuse("write", "publish with the client library")

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        _refuse("writeStream", "publish with the client library")

    def _chosen(self) -> ReadOptions:
        return read_options({name.lower(): value for name, value in self.options.items()})


class RefusingStreamReader(DataSourceStreamReader):
    """Refuses with its first call: Spark hides an error that is raised while it is created."""

    def initialOffset(self) -> dict[str, int]:
        _refuse("readStream", "read it with spark.read")

    def latestOffset(self, *_: Any, **__: Any) -> dict[str, int]:  # the first call of Spark 4.1
        _refuse("readStream", "read it with spark.read")

    def read(self, partition: InputPartition) -> NoReturn:
        _refuse("readStream", "read it with spark.read")


def _pushes_filters() -> bool:
    """Whether Spark asks for the reader in order to push filters to it.

    It does so only where `spark.sql.python.filterPushdown.enabled` is on, in a worker program of
    its own; everywhere else it refuses a reader that has `pushFilters`. Neither the setting nor the
    purpose is passed to a data source, so the caller is looked up.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        spec = frame.f_globals.get("__spec__")
        if spec is not None and spec.name == _PUSHING_WORKER:
            return True
        frame = frame.f_back
    return False


def _refuse(feature: str, instead: str) -> NoReturn:
    # Not Spark's own NotImplementedError: it is caught there and hides this text.
    raise RuntimeError(f'the data source "{NAME}" does not support {feature} yet: {instead}')
