"""Histories kept as columns look like lists of rows, and are few objects."""

from __future__ import annotations

import gc
from typing import NamedTuple

import pytest

from llmctl.runtime.stats.column_table import ColumnTable


class Point(NamedTuple):
    number: int
    value: float


ROWS = [(1, 0.5), (2**40, -1.0), (3, 2.25)]


@pytest.mark.parametrize("start", [0, 2, 3])
def test_columns_are_a_sequence_of_the_rows_they_were_given(start):
    columns = ColumnTable(Point, "qd", ROWS[:start])
    for row in ROWS[start:]:
        columns.append(row)
    assert len(columns) == 3 and columns == [Point(*row) for row in ROWS]
    assert columns[-1] == Point(3, 2.25) and columns[:2] == [Point(*row) for row in ROWS[:2]]
    assert [point.number for point in columns] == [1, 2**40, 3]
    assert Point(2**40, -1.0) in columns and columns != [Point(1, 0.5)]


def test_columns_without_rows_are_empty():
    columns = ColumnTable(Point, "qd")
    assert not columns and list(columns) == [] == columns[:]
    with pytest.raises(IndexError):
        columns[0]


def test_a_long_history_adds_no_objects_for_garbage_collections_to_walk():
    columns = ColumnTable(Point, "qd")
    gc.collect()
    before = len(gc.get_objects())
    for number in range(10_000):
        columns.append((number, 0.0))
    assert len(gc.get_objects()) - before < 100
