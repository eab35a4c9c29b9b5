"""Assignments: brings the view of the registry to the links, and leaves the cluster.

Owns the part of this broker in its cluster. It grants nothing: links claim the partitions
assigned to them, and storage decides.
"""

import asyncio
import logging
from collections.abc import Mapping

from broker_svc.links.holders import Holders
from broker_svc.links.link_state import Assigned
from broker_svc.links.partition_link import PartitionLink
from broker_svc.links.storage_nodes import StorageNodes
from tidemark.clock import Clock
from tidemark.errors import MemberReplaced, TidemarkError
from tidemark.registry.membership import Membership
from tidemark.registry.protocol import View

_ASK_STORAGE_MS = 500

_log = logging.getLogger(__name__)


class Assignments:
    """The assignments of the cluster, as this broker follows them."""

    def __init__(
        self,
        links: Mapping[int, PartitionLink],
        holders: Holders,
        storage_nodes: StorageNodes,
        clock: Clock,
        incarnation: int,
    ) -> None:
        self.incarnation = incarnation
        """Of this broker, in the registry and in storage."""
        self.membership: Membership | None = None
        """None until `join`."""
        self.replaced: MemberReplaced | None = None
        """Set once another process with the id of this broker has joined."""
        self.is_static = True
        """Whether brokers come from settings."""
        self._links = links
        self._holders = holders
        self._storage_nodes = storage_nodes
        self._clock = clock

    def follow(self, view: View) -> None:
        """Let every link follow the view."""
        self._holders.view = view
        for number, link in self._links.items():
            holder_id = view.assignment.holders.get(number, "")
            holder = view.members.get(holder_id)
            address = "" if holder is None else holder.address
            link.follow(Assigned(view.assignment.version, holder_id, address))

    async def run(self, membership: Membership, *, static: bool) -> None:
        """Take part in the cluster; returns when this broker has left it, or was replaced.

        A broker that cannot reach storage does not join: partitions would come to it and wait.
        """
        self.membership, self.is_static = membership, static
        following = asyncio.create_task(self._follow(membership))
        try:
            if static:
                await membership.run_once()
            else:
                await self._until_storage_answers()
                await membership.run()
            await following
        except MemberReplaced as error:
            _log.error("another process has taken the id of this broker: %s", error)
            self.replaced = error
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def hand_over(self) -> None:
        """Give all partitions to other brokers, if there are any, and leave the cluster."""
        if self.membership is not None and not self.is_static and self.replaced is None:
            await self.membership.leave(self._all_away)

    def suspect(self, member_id: str) -> None:
        if self.membership is not None:
            self.membership.suspect(member_id)

    def outdated(self, link: PartitionLink, version: int) -> None:
        """Storage knows this version, or refuses the present one."""
        if self.membership is not None and not self.is_static:
            self.membership.saw_version(version)
        elif not link.was_held:
            # The cluster had a registry before. Once, so that a cluster with both does not end in
            # brokers that fence each other.
            link.follow(link.assigned._replace(version=version))

    async def _follow(self, membership: Membership) -> None:
        while True:
            membership.changed.clear()
            self.follow(membership.view)
            await membership.changed.wait()

    async def _until_storage_answers(self) -> None:
        while True:
            answers = await self._storage_nodes.describe()
            if not all(isinstance(each, TidemarkError) for each in answers.values()):
                return
            await self._clock.sleep_ms(_ASK_STORAGE_MS)

    async def _all_away(self) -> None:
        await asyncio.gather(*(link.until_away() for link in self._links.values()))
