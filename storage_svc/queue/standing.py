"""A standing reserve: a consumer that waits for messages of one group, known to storage.

Pure, and never stored: it ends with the bind of the broker that made it (ADR 21).
"""

from typing import ClassVar


class Standing:
    """The bounds of a waiting consumer, which a reserve has as well, once messages are ready."""

    __slots__ = (
        "broker_epoch",
        "bytes_max",
        "messages_max",
        "owner_epoch",
        "reports_hand_outs",
        "standing_id",
        "visibility_ms",
    )

    strict_bytes: ClassVar = True

    def __init__(
        self,
        standing_id: int,
        broker_epoch: int,
        messages_max: int,
        bytes_max: int,
        visibility_ms: int,
        owner_epoch: int,
        *,
        reports_hand_outs: bool,
    ) -> None:
        self.standing_id = standing_id
        self.broker_epoch = broker_epoch
        self.messages_max = messages_max
        """How many messages it may still hand out."""
        self.bytes_max = bytes_max
        """How many bytes one commit may hand out."""
        self.visibility_ms = visibility_ms
        self.owner_epoch = owner_epoch
        self.reports_hand_outs = reports_hand_outs

    def is_named(self, standing_id: int, broker_epoch: int) -> bool:
        """Whether a broker means this one: ids are those of one bind."""
        return (self.standing_id, self.broker_epoch) == (standing_id, broker_epoch)
