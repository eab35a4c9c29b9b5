"""Eviction markers: the three paths that clear them, and that no choice of ids mixes two up."""

from hypothesis import given
from hypothesis import strategies as st

from broker_svc.exclusive.markers import EvictionMarkers

Key = tuple[str, str, str]

# Few different characters, among them those that could join ids.
ids = st.text(alphabet="ab/|:\0\n ü", max_size=3)
keys = st.tuples(ids, ids, ids)


def marked(*keys: Key, epoch: int = 1) -> EvictionMarkers:
    markers = EvictionMarkers()
    for key in keys:
        markers.add(*key, epoch)
    return markers


def test_a_client_is_marked_from_its_eviction_on() -> None:
    """E2."""
    markers = EvictionMarkers()
    assert markers.epoch("ada", "g", "own/a") is None

    markers.add("ada", "g", "own/a", 7)

    assert markers.epoch("ada", "g", "own/a") == 7
    assert len(markers) == 1


def test_a_later_eviction_replaces_an_earlier() -> None:
    markers = marked(("ada", "g", "own/a"), epoch=7)

    markers.add("ada", "g", "own/a", 9)

    assert markers.epoch("ada", "g", "own/a") == 9
    assert len(markers) == 1


def test_a_marker_whose_epoch_is_not_known_is_a_marker_too() -> None:
    markers = marked(("ada", "g", "own/a"), epoch=0)

    assert markers.epoch("ada", "g", "own/a") == 0

    markers.remove("ada", "g", "own/a")

    assert markers.epoch("ada", "g", "own/a") is None
    assert len(markers) == 0


def test_resubscription_removes_one_and_a_second_time_is_harmless() -> None:
    """E4."""
    markers = marked(("ada", "g", "own/a"), ("ada", "g", "own/b"))

    markers.remove("ada", "g", "own/a")
    markers.remove("ada", "g", "own/a")
    markers.remove("stranger", "g", "own/a")

    assert markers.epoch("ada", "g", "own/a") is None
    assert markers.epoch("ada", "g", "own/b") == 1
    assert len(markers) == 1


def test_a_resync_keeps_only_what_is_reported_and_marks_nothing_new() -> None:
    """E4."""
    markers = marked(("ada", "g", "own/a"), ("ada", "g", "own/b"), ("ada", "other", "own/a"))

    markers.keep_only("ada", "g", ["own/b", "own/c"])

    assert markers.epoch("ada", "g", "own/a") is None
    assert markers.epoch("ada", "g", "own/b") == 1
    assert markers.epoch("ada", "g", "own/c") is None
    assert markers.epoch("ada", "other", "own/a") == 1
    assert len(markers) == 2


def test_a_disconnect_removes_all_of_a_client_and_of_no_other() -> None:
    """E4."""
    markers = marked(("ada", "g", "own/a"), ("ada", "h", "own/b"), ("bob", "g", "own/a"))

    markers.remove_client("ada")
    markers.remove_client("ada")

    assert markers.epoch("ada", "g", "own/a") is None
    assert markers.epoch("ada", "h", "own/b") is None
    assert markers.epoch("bob", "g", "own/a") == 1
    assert len(markers) == 1


steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), keys, st.integers(0, 9)),
        st.tuples(st.just("remove"), keys, st.none()),
        st.tuples(st.just("keep_only"), keys, st.lists(ids, max_size=3)),
        st.tuples(st.just("remove_client"), keys, st.none()),
    ),
    max_size=30,
)


@given(steps=steps, asked=st.lists(keys, max_size=5))
def test_markers_are_those_of_a_flat_model_whatever_the_ids(
    steps: list[tuple[str, Key, object]], asked: list[Key]
) -> None:
    """E4: clients and groups are isolated from each other, whatever characters their ids hold."""
    markers, model = EvictionMarkers(), dict[Key, int]()

    for kind, key, detail in steps:
        client_id, group, _ = key
        if kind == "add":
            assert isinstance(detail, int)
            markers.add(*key, detail)
            model[key] = detail
        elif kind == "remove":
            markers.remove(*key)
            model.pop(key, None)
        elif kind == "keep_only":
            assert isinstance(detail, list)
            markers.keep_only(client_id, group, detail)
            model = {
                each: epoch
                for each, epoch in model.items()
                if each[:2] != (client_id, group) or each[2] in detail
            }
        else:
            markers.remove_client(client_id)
            model = {each: epoch for each, epoch in model.items() if each[0] != client_id}

        assert len(markers) == len(model)
        for each in [*model, *asked, *(key for _, key, _ in steps)]:
            assert markers.epoch(*each) == model.get(each)
