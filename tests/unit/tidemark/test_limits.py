"""Limits: complete, described, and consistent with each other."""

from tidemark import limits
from tidemark.reference import all_limits


def test_every_public_constant_is_documented() -> None:
    """S3: every limit is documented."""
    constants = {name for name in vars(limits) if name.isupper() and not name.startswith("_")}

    assert {limit.name for limit in all_limits()} == constants


def test_every_limit_is_a_positive_whole_number_with_a_sentence() -> None:
    for limit in all_limits():
        assert type(limit.value) is int, limit.name
        assert limit.value > 0, limit.name
        assert limit.doc.endswith("."), limit.name


def test_smaller_things_fit_into_larger_ones() -> None:
    assert limits.MESSAGE_BYTES_MAX + limits.HEADERS_BYTES_MAX < limits.RUN_BYTES_MAX
    assert limits.RUN_BYTES_MAX < limits.FRAME_BYTES_MAX < limits.GRPC_RECEIVE_BYTES_MAX
    assert limits.PAGE_SIZE_DEFAULT <= limits.PAGE_SIZE_MAX
    assert limits.VISIBILITY_TIMEOUT_MS_MIN < limits.VISIBILITY_TIMEOUT_MS_MAX
    assert limits.FAIRNESS_WEIGHT_MIN < limits.FAIRNESS_WEIGHT_MAX


def test_a_full_sync_of_the_longest_names_fits_one_frame() -> None:
    name_bytes = limits.TOPIC_NAME_BYTES_MAX + 1 + limits.LITE_NAME_BYTES_MAX
    entry_bytes = name_bytes + limits.GROUP_NAME_BYTES_MAX + 64

    assert limits.SUBSCRIPTIONS_PER_SESSION_MAX * entry_bytes < limits.FRAME_BYTES_MAX
