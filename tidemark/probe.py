"""Checks the gRPC health of a service: `python -m tidemark.probe [ADDRESS] [--service NAME]`.

For containers and scripts. Exits with 0 if the service reports SERVING; with 1 and one line on
stderr if it does not, or does not answer in time; with 2 on wrong usage. It asks once.
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
        help="host:port; default: the service configured by the environment of this process",
    )
    parser.add_argument("--service", default=READINESS, help="name of the health service to check")
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
    """Addresses of the services on this machine, from the settings they are started with.

    A container runs only one of them, so the other addresses do not answer.
    """
    for service in SERVICES:
        listen: str = getattr(service.from_environment(environ), "listen", "")
        host, port = split_address(listen) if listen else ("", 0)
        if port:  # a port chosen by the kernel is not known here
            yield join_address(reached_at(host), port)


async def _check(address: str, service: str, timeout_ms: int) -> str:
    """The reason why the service is not serving; empty if it is."""
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
