"""The planner process: starts Spark, runs the passes that the scheduler requests, ends with it.

Requests arrive on standard input, replies leave on standard output (`lines`). It ends when its
input is closed, and with status 1 when Spark is lost or does not start.
"""

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Final

from spark_batch.planner.lines import (
    PassDone,
    PassProgress,
    PassRequest,
    Ready,
    Reply,
    SparkFailed,
    failure_of,
)
from spark_batch.planner.spark_passes import SparkPasses
from tidemark import telemetry
from tidemark.clock import Clock, SystemClock
from tidemark.settings import RetentionSettings, load_or_exit

SERVICE: Final = "tidemark-retention"
LOST: Final = 1
"""Exit status of a planner if its Spark did not start or was lost."""

_log = logging.getLogger(__name__)

Send = Callable[[Reply], None]


async def serve(
    requests: asyncio.StreamReader, send: Send, settings: RetentionSettings, clock: Clock
) -> int:
    """Start Spark and run passes until the input ends; returns the exit status."""
    passes = SparkPasses(settings, clock)
    serving = asyncio.ensure_future(_serve(requests, send, passes))
    lost = asyncio.ensure_future(passes.lost.wait())
    try:
        await asyncio.wait({serving, lost}, return_when=asyncio.FIRST_COMPLETED)
        if lost.done():
            send(SparkFailed(passes.why_lost))
            return LOST
        await serving
        await passes.stop()
        return 0
    finally:
        serving.cancel()
        lost.cancel()


async def _serve(requests: asyncio.StreamReader, send: Send, passes: SparkPasses) -> None:
    try:
        await passes.start()
    except Exception as error:
        send(SparkFailed(str(error) or type(error).__name__))
        raise
    send(Ready())
    running: set[asyncio.Task[None]] = set()
    while line := await requests.readline():
        task = asyncio.create_task(_run(PassRequest.decode(line), send, passes))
        running.add(task)
        task.add_done_callback(running.discard)


async def _run(request: PassRequest, send: Send, passes: SparkPasses) -> None:
    try:
        outcome = await passes.run(
            request.job,
            request.dry_run,
            lambda *progress: send(PassProgress(request.number, *progress)),
        )
    except Exception as error:
        send(failure_of(request.number, error))
    else:
        send(PassDone(request.number, outcome))


async def _main(settings: RetentionSettings, replies: int) -> int:
    requests = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(requests), sys.stdin
    )

    def send(reply: Reply) -> None:
        with suppress(BrokenPipeError), os.fdopen(os.dup(replies), "wb") as pipe:
            pipe.write(reply.encode())

    return await serve(requests, send, settings, SystemClock())


def main() -> None:
    settings = load_or_exit(RetentionSettings)
    # Output of Spark and its Java must not appear among the replies.
    replies = os.dup(1)
    os.dup2(2, 1)
    # The scheduler reports the metrics; its address for them is taken.
    without_metrics = replace(settings.telemetry, metrics_exporter="none", metrics_listen="")
    started = telemetry.setup(SERVICE, without_metrics)
    status = LOST
    try:
        status = asyncio.run(_main(settings, replies))
    except Exception:
        _log.exception("the planner ends")
    finally:
        started.shutdown()
        sys.stderr.flush()
        # Threads that wait for Java or storage must not delay the end of the process.
        os._exit(status)


if __name__ == "__main__":
    main()
