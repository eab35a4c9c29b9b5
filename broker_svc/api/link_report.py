"""Reports the state of the links to health checks, and moved partitions to clients."""

import logging
from collections.abc import Sequence
from typing import Final

from broker_svc.api.broker_service import BrokerService
from broker_svc.components import BrokerComponents
from broker_svc.links.link_state import LinkState
from broker_svc.links.partition_link import PartitionLink
from tidemark.rpc.server import RpcServer

BROKER_SERVICE: Final = "tidemark.api.broker.v1.BrokerService"

_log = logging.getLogger(__name__)


async def report_links(
    server: RpcServer, service: BrokerService, components: BrokerComponents
) -> None:
    """Report every change, until cancelled."""
    was_ready = False
    links = list(components.links.values())
    holders = dict.fromkeys(links, "")
    while True:
        components.links_changed.clear()
        for link in links:
            holder, holders[link] = holders[link], link.holder_address
            if link.holder_address not in ("", holder):
                service.partition_moved(link)
        is_assigned = bool(components.holders.view.assignment.holders)
        is_ready = is_assigned and _is_ready(links, was_ready)
        server.set_serving(BROKER_SERVICE, is_ready)
        if is_ready != was_ready:
            _log.info(
                "broker serves" if is_ready else "broker not ready",
                extra={
                    "partitions": sum(1 for link in links if link.is_assigned),
                    "links_down": sum(1 for link in links if link.state is LinkState.CLAIMING),
                },
            )
            was_ready = is_ready
        await components.links_changed.wait()


def _is_ready(links: Sequence[PartitionLink], was_ready: bool) -> bool:
    """Ready unless the links to storage are down.

    A faulty partition, or one that another broker holds, does not keep clients from the others. A
    link that is reconnecting will be up soon, and calls would fail until then: not ready. A storage
    node that is away concerns its own partitions only (C1): a broker starts without it, and stays
    ready while the links to another node are up. So is a broker without partitions. A broker that
    reaches no storage keeps its partitions: others, as a rule, reach it no better.
    """
    own = [link for link in links if link.state is not LinkState.AWAY]
    down = [link for link in own if link.state is LinkState.CLAIMING]
    incomplete = {link.node for link in down}
    whole = not own or any(link.node not in incomplete for link in own)
    return whole and (was_ready or all(link.is_unreachable for link in down))
