"""The README's picture is what the measured rows give."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

from scripts.docs.speed_picture import PICTURE, Pair, draw, read_pairs


def test_the_committed_picture_is_that_of_the_rows() -> None:
    assert PICTURE.read_text() == draw(read_pairs()), "python -m scripts.docs.speed_picture"


def test_bars_are_as_long_as_speeds() -> None:
    root = ElementTree.fromstring(draw([Pair("a", "b", 50.0, 100.0)]))
    bars = [float(item.get("width", 0)) for item in root if item.tag.endswith("rect")]
    assert bars[1] == 2 * bars[0] > 0
