"""Asks a service for its gRPC health: `python -m tidemark.probe [ADDRESS] [--service NAME]`.

For containers and scripts. It exits with 0 when the answer is SERVING, with 1 and one line on
stderr when it is not or when there is no answer, with 2 when it was called wrongly. It asks once
and never waits longer than its timeout.
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tidemark.errors import TidemarkError
from tidemark.local.ports import join_address, reached_at
from tidemark.rpc import open_channel
from tidemark.rpc.health import READINESS
from tidemark.settings import SERVICES
from tidemark.settings.variables import Address, SettingsError, split_address

TIMEOUT_MS_DEFAULT: Final = 3_000

_STATUS: Final = HealthCheckResponse.ServingStatus


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tidemark.probe", description=__doc__)
    parser.add_argument(
        "address",
        nargs="?",
        type=Address().parse,
        help="host:port; without it, the service that the environment configures on this machine",
    )
    parser.add_argument("--service", default=READINESS, help="the name that is asked about")
    parser.add_argument("--timeout-ms", type=int, default=TIMEOUT_MS_DEFAULT)
    options = parser.parse_args(arguments)
    try:
        addresses = [options.address] if options.address else list(own_addresses())
    except SettingsError as error:
        parser.error(str(error))
    failures = [
        failure
        for address in addresses
        if (failure := asyncio.run(_check(address, options.service, options.timeout_ms)))
    ]
    if len(failures) < len(addresses):
        return 0
    print("; ".join(failures), file=sys.stderr)
    return 1


def own_addresses(environ: Mapping[str, str] | None = None) -> Iterator[str]:
    """Where the services of this machine are reached, by the settings they are started with.

    A container runs one of them; nobody listens at the addresses of the others.
    """
    for service in SERVICES:
        listen: str = getattr(service.from_environment(environ), "listen", "")
        host, port = split_address(listen) if listen else ("", 0)
        if port:  # a port that was left to the kernel is known to nobody else
            yield join_address(reached_at(host), port)


async def _check(address: str, service: str, timeout_ms: int) -> str:
    """What is wrong; empty when it serves."""
    async with open_channel(address) as channel:
        health: Any = HealthStub(channel)  # its published types are those of the blocking stub
        request = HealthCheckRequest(service=service)
        try:
            answer = await health.Check(request, timeout=timeout_ms / 1000)
        except TidemarkError as error:
            return f"{address}: {error.detail}"
    if answer.status == HealthCheckResponse.SERVING:
        return ""
    return f"{address}: {service or 'the server'} is {_STATUS.Name(answer.status)}"


if __name__ == "__main__":
    sys.exit(main())
