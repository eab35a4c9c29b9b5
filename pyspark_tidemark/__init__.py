"""The data source `tidemark`: the tables of a Tidemark cluster in any PySpark session.

Spark imports every top-level module named `pyspark_*` and registers its `DefaultSource`, so that
`spark.read.format("tidemark")` works wherever this package is installed. The package stands alone:
it imports neither services nor the client library of Tidemark.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pyspark_tidemark.source import TidemarkSource as DefaultSource

__all__ = ["DefaultSource"]


def __getattr__(name: str) -> Any:
    """`DefaultSource`, imported on first use: it needs PySpark, 70 MB that other modules do not."""
    if name != "DefaultSource":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from pyspark_tidemark.source import TidemarkSource

    return TidemarkSource
