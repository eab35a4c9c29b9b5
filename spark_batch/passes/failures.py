"""Failures of single partitions: executors collect them, and the pass goes on with the others.

A partition that cannot be read or refuses a deletion is reported with its error at the end of the
pass; the next pass tries it again.
"""

from typing import TypeAlias

from pyspark import AccumulatorParam, SparkContext
from pyspark.accumulators import Accumulator

Failures: TypeAlias = Accumulator[dict[int, str]]
"""The first error of each partition. Executors add to it, the driver reads it."""


class _FirstErrors(AccumulatorParam[dict[int, str]]):
    def zero(self, value: dict[int, str]) -> dict[int, str]:
        return {}

    def addInPlace(self, value1: dict[int, str], value2: dict[int, str]) -> dict[int, str]:
        return {**value2, **value1}


def collect_failures(context: SparkContext) -> Failures:
    return context.accumulator({}, _FirstErrors())
