"""Block tables that are kept from round to round are those that packing all of them gives."""

from __future__ import annotations

import random

import numpy as np
import pytest

from llmctl.runtime.rounds import tables as module
from llmctl.runtime.rounds.tables import KeptTables
from llmctl.runtime.step import pack_tables


def changed(tables: list[list[int]], rng: random.Random) -> bool:
    """Do to some of them what happens between rounds; whether anything did."""
    before = [list(table) for table in tables]
    for table in rng.sample(tables, rng.randrange(len(tables) + 1)):
        what = rng.randrange(4)
        if what == 0:
            table += rng.sample(range(1, 99), rng.randrange(3))
        elif what == 1 and table:
            table[rng.randrange(len(table))] = rng.randrange(1, 99)
        elif what == 2:
            del table[rng.randrange(len(table) + 1) :]
        else:
            table[:] = rng.sample(range(1, 99), rng.randrange(6))
    return tables != before


@pytest.mark.parametrize("seed", range(20))
def test_kept_tables_are_those_that_packing_gives(seed):
    rng, kept = random.Random(seed), KeptTables()
    for count in (3, 3, 5, 1, 1, 8):
        tables = [rng.sample(range(1, 99), rng.randrange(1, 9)) for _ in range(count)]
        kept.forget()
        is_new = True
        for _ in range(12):
            assert kept.update(tables) == is_new
            assert np.array_equal(kept.array, pack_tables(tables))
            assert kept.array.dtype == np.int32
            assert kept.lens == list(map(len, tables))
            is_new = changed(tables, rng)


def test_equal_tables_of_other_requests_are_written_again():
    kept = KeptTables()
    assert kept.update([[1, 2], [3]]) and not kept.update([[1, 2], [3]])
    kept.forget()
    assert kept.update([[1, 2], [3]]) and not kept.update([[1, 2], [3]])


def test_a_round_packs_no_table_that_has_not_changed(monkeypatch):
    kept = KeptTables()
    tables = [[row, row + 1, row + 2] for row in range(256)]
    kept.update(tables)
    packed = []
    monkeypatch.setattr(module, "pack_tables", packed.append)
    tables[7].append(9)
    assert kept.update(tables) and not kept.update(tables)
    assert not packed and kept.array[7].tolist() == [7, 8, 9, 9] and kept.array[6, 3] == 0
