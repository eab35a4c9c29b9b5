"""The two names of health that supervisors ask about, over a real server."""

from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.support.echo_service import SERVICE, serving
from tidemark.rpc import RpcServer, open_channel
from tidemark.rpc.health import LIVENESS, READINESS, Health

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING


async def status(server: RpcServer, name: str) -> int:
    async with open_channel(server.address) as channel:
        health: Any = HealthStub(channel)
        answer: HealthCheckResponse = await health.Check(HealthCheckRequest(service=name))
        return answer.status


async def test_a_server_is_live_and_not_ready_while_one_of_its_services_does_not_serve() -> None:
    """S1."""
    async with serving({}) as echo:
        assert await status(echo.server, READINESS) == SERVING

        echo.server.set_serving(SERVICE, False)

        assert await status(echo.server, LIVENESS) == SERVING
        assert await status(echo.server, READINESS) == NOT_SERVING


async def test_a_server_becomes_ready_again_when_the_service_serves() -> None:
    async with serving({}) as echo:
        echo.server.set_serving(SERVICE, False)

        echo.server.set_serving(SERVICE, True)

        assert await status(echo.server, READINESS) == SERVING


@pytest.mark.parametrize(
    ("name", "expected"), [(LIVENESS, SERVING), (READINESS, NOT_SERVING), ("", NOT_SERVING)]
)
async def test_a_server_that_drains_is_live_and_not_ready(name: str, expected: int) -> None:
    """S5: a supervisor that asks for liveness does not kill a process in the middle of its drain.

    Asked of the servicer itself: a server that drains takes no new connections.
    """
    health = Health()
    health.set("", True)
    health.shut_down()

    no_context: Any = None
    answers = [each async for each in health.Watch(HealthCheckRequest(service=name), no_context)]

    assert [answer.status for answer in answers] == [expected]
