"""The data source `tidemark`: the tables of a Tidemark cluster in any PySpark session.

Spark imports every top-level module named `pyspark_*` and registers its `DefaultSource`, so that
`spark.read.format("tidemark")` works wherever this package is installed. The package stands alone:
it imports neither services nor the client library of Tidemark.
"""

from pyspark_tidemark.source import TidemarkSource as DefaultSource

__all__ = ["DefaultSource"]
