"""Two thread blocks that share a context in tree.cu, on a CPU: what is merged, where and when."""

from __future__ import annotations

import pytest
from support.emulated_shares import compile_shares


@pytest.mark.parametrize(("size", "group"), [(128, 1), (128, 2), (128, 4), (128, 8), (64, 4)])
def test_blocks_merge_all_work_items_in_order_and_get_every_row_of_the_tail(size, group):
    found = compile_shares(splits=2, size=size, group=group)
    for units in range(10 if group == 4 else 3):
        assert found.check_merging(units, 0) == 0, units
    for units, begun in ((17, 1), (25, 2), (26, 3)):  # of work items of two and of four tiles
        assert found.check_merging(units, begun) == 0, units
    assert found.check_tail() == 0
