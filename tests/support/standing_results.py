"""Results of standing reserves as a test compares them: plain hand-outs in the long form."""

from collections.abc import Iterable, Iterator

from storage_svc.operations.reserve import Reserved, ReservedSlice
from storage_svc.operations.standing import HandedOut, HandOut
from tidemark.receipts import Receipt


def in_long_form(results: Iterable[Reserved | HandedOut]) -> Iterator[Reserved]:
    for result in results:
        if isinstance(result, Reserved):
            yield result
        else:
            yield from map(_reserved, result.hand_outs)


def _reserved(hand_out: HandOut) -> Reserved:
    """A first delivery, without anything that columns do not carry."""
    standing_id, left, reservation_id, receipt, first_offset, messages, body, *rest = hand_out
    visibility_ms, publish_time_ms, owner_epoch = rest
    handed_out = ReservedSlice(
        reservation_id,
        receipt,
        Receipt.decode(receipt).queue_id,
        first_offset,
        messages,
        body,
        attempt_count=0,
        delivery_count=1,
        owner_epoch=owner_epoch,
        visibility_ms=visibility_ms,
        publish_time_ms=publish_time_ms,
        fairness_key="",
        traceparent="",
        last_attempt=False,
    )
    return Reserved((handed_out,), standing_messages=left, standing_id=standing_id)
