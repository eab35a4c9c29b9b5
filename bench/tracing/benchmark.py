"""Benchmark `tracing`: the cost of tracing for a cycle, at the default sampling ratio.

Three clusters, each with a client in its own process, take turns. Two of them send traces to a
collector: one together with its client, the other draws the sample for a client without tracing.
"""

import asyncio
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

from bench.harness.benchmark import Bench, Round, benchmark
from bench.harness.cluster import running_cluster
from bench.harness.usage import cpu_ns
from tidemark.local.cluster import SERVICES, LocalCluster

COST_MAX: Final = 0.05
RUN_MESSAGES: Final = 100
_PLAIN: Final = "without tracing"
_TRACED: Final = "with tracing"
_DRAWN: Final = "services alone"
_RATE: Final = "messages_per_s"
_CPU: Final = "cpu_us_per_message"
"""CPU time of client and services: more reliable than the rate on a shared machine."""


@benchmark("tracing", "the cost of tracing at default sampling")
async def tracing(bench: Bench) -> None:
    cycles = bench.size(full=3000, quick=300)
    bench.settings |= {"cycles": cycles, "run_messages": RUN_MESSAGES}
    async with AsyncExitStack() as opened:
        collector = await opened.enter_async_context(_collector())
        rounds: dict[str, Round] = {}
        for name, services, program in (
            (_PLAIN, {}, {}),
            (_TRACED, collector.variables, collector.variables),
            (_DRAWN, collector.variables, {}),
        ):
            directory = bench.directory / name.split()[0]
            cluster = await opened.enter_async_context(
                running_cluster(directory, variables=services)
            )
            client = await opened.enter_async_context(_client(cluster, cycles, program))
            rounds[name] = client.round
        results = await bench.measure(rounds)
    bench.settings["spans"] = collector.spans
    plain = results[_PLAIN]
    for name in (_TRACED, _DRAWN):
        rate, cpu = (results[name][each].over(plain[each]).median for each in (_RATE, _CPU))
        bench.at_least(f"{name} / {_PLAIN}: {_RATE}", rate, 1 - COST_MAX)
        bench.at_most(f"{name} / {_PLAIN}: {_CPU}", cpu, 1 + COST_MAX)


class _Collector(TraceServiceServicer):
    """Counts the spans that it receives."""

    def __init__(self) -> None:
        self.spans = 0
        self.variables: Mapping[str, str] = {}

    async def Export(
        self, request: ExportTraceServiceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> ExportTraceServiceResponse:
        self.spans += sum(
            len(scope.spans) for each in request.resource_spans for scope in each.scope_spans
        )
        return ExportTraceServiceResponse()


@asynccontextmanager
async def _collector() -> AsyncIterator[_Collector]:
    collector = _Collector()
    server = grpc.aio.server()
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    collector.variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
        "OTEL_METRICS_EXPORTER": "none",
    }
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


class _Client:
    """A program that measures one round on demand."""

    def __init__(self, process: Process, cluster: LocalCluster, messages: int) -> None:
        self._process = process
        self._pids = [process.pid, *map(cluster.pid, SERVICES)]
        self._messages = messages

    async def round(self) -> Mapping[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        before_ns = sum(map(cpu_ns, self._pids))
        self._process.stdin.write(b"\n")
        took_s = float(await self._process.stdout.readline())
        used_ns = sum(map(cpu_ns, self._pids)) - before_ns
        return {_RATE: self._messages / took_s, _CPU: used_ns / 1000 / self._messages}


@asynccontextmanager
async def _client(
    cluster: LocalCluster, cycles: int, variables: Mapping[str, str]
) -> AsyncIterator[_Client]:
    address = cluster.address("broker")
    command = ("-m", "bench.tracing.client", address, str(cycles), str(RUN_MESSAGES))
    process = await asyncio.create_subprocess_exec(
        sys.executable, *command, stdin=PIPE, stdout=PIPE, env={**os.environ, **variables}
    )
    try:
        yield _Client(process, cluster, cycles * RUN_MESSAGES)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
