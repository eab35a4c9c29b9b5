"""The lines between scheduler and planner: one JSON object each, over the pipes of the child.

Pure. Both ends are the same version of the same program, so there is no version to negotiate.
"""

import json
from base64 import b64decode, b64encode
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from google.rpc.status_pb2 import Status

from spark_batch.passes.findings import Finding
from spark_batch.passes.outcome import JobName, Pass
from tidemark.errors import Internal, TidemarkError
from tidemark.rpc.statuses import from_status, to_status


@dataclass(frozen=True, slots=True)
class PassRequest:
    """From the scheduler: run a pass. `number` identifies it in the replies."""

    number: int
    job: JobName
    dry_run: bool

    def encode(self) -> bytes:
        return _line(asdict(self))

    @classmethod
    def decode(cls, line: bytes) -> "PassRequest":
        found = json.loads(line)
        return cls(found["number"], JobName(found["job"]), found["dry_run"])


@dataclass(frozen=True, slots=True)
class Ready:
    """From the planner: Spark runs."""

    def encode(self) -> bytes:
        return _line({"ready": True})


@dataclass(frozen=True, slots=True)
class SparkFailed:
    """From the planner: Spark does not start or is lost, for this reason; the process ends."""

    why: str

    def encode(self) -> bytes:
        return _line({"spark_failed": self.why})


@dataclass(frozen=True, slots=True)
class PassProgress:
    """From the planner: how far a pass is that Spark runs."""

    number: int
    tasks: int
    tasks_done: int
    rows_planned: int
    rows_applied: int

    def encode(self) -> bytes:
        return _line(asdict(self))


@dataclass(frozen=True, slots=True)
class PassDone:
    """From the planner: a pass ended with this outcome."""

    number: int
    outcome: Pass

    def encode(self) -> bytes:
        return _line({"number": self.number, "outcome": asdict(self.outcome)})


@dataclass(frozen=True, slots=True)
class PassFailed:
    """From the planner: a pass ended with this error."""

    number: int
    error: TidemarkError

    def encode(self) -> bytes:
        status = b64encode(to_status(self.error).SerializeToString()).decode()
        return _line({"number": self.number, "status": status})


Reply: TypeAlias = Ready | SparkFailed | PassProgress | PassDone | PassFailed


def decode_reply(line: bytes) -> Reply:
    """A line of the planner. Raises ValueError or KeyError for any other line."""
    found = json.loads(line)
    if "ready" in found:
        return Ready()
    if "spark_failed" in found:
        return SparkFailed(found["spark_failed"])
    number = found["number"]
    if "tasks" in found:
        return PassProgress(**found)
    if "status" in found:
        return PassFailed(number, from_status(Status.FromString(b64decode(found["status"]))))
    return PassDone(number, _outcome(found["outcome"]))


def failure_of(number: int, error: Exception) -> PassFailed:
    """The reply for a pass that raised; errors of Spark and Python get their text as detail."""
    if isinstance(error, TidemarkError):
        return PassFailed(number, error)
    return PassFailed(number, Internal(str(error) or type(error).__name__))


def _outcome(found: dict[str, Any]) -> Pass:
    findings = tuple(Finding(**each) for each in found.pop("findings"))
    failed = {int(partition): why for partition, why in found.pop("failed").items()}
    return Pass(findings=findings, failed=failed, **found)


def _line(content: dict[str, Any]) -> bytes:
    return json.dumps(content).encode() + b"\n"
