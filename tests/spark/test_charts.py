"""Charts: pure text, with every figure in it."""

from xml.etree import ElementTree

from spark_batch.charts import bars, columns


def test_the_longest_bar_is_the_largest_value() -> None:
    drawn = ElementTree.fromstring(bars({"a": 10, "b": 5}, "messages"))

    lengths = [float(rect.attrib["width"]) for rect in drawn.iter("rect")]

    assert lengths == [440.0, 220.0]


def test_parts_of_a_column_add_up_to_its_height() -> None:
    drawn = columns({"old": {"x": 3, "y": 1}, "new": {"y": 4}}, "messages")
    svg = ElementTree.fromstring(drawn.partition("<ul")[0])

    heights = [float(rect.attrib["height"]) for rect in svg.iter("rect")]

    assert heights == [144.0, 48.0, 192.0]
    assert "<li>" in drawn


def test_names_from_users_cannot_become_markup() -> None:
    drawn = bars({"<script>&": 1}, "messages")

    assert "<script>" not in drawn
    ElementTree.fromstring(drawn)


def test_nothing_to_show_is_said() -> None:
    assert "Nothing yet" in bars({}, "messages")
    assert "Nothing yet" in columns({"a": {}}, "messages")
