"""--tune-tree: of which methods, and what is reported."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from llmctl.builder.heads.medusa.tree import parse_choices
from llmctl.cli.bench.tree import counting, tree_json, tree_line
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding


@pytest.mark.parametrize("method", [PlainDecoding(), NgramLookup(4, 3)])
def test_a_method_without_heads_has_no_tree(method):
    with pytest.raises(BadConfig, match=f"the draft method is {method.name}") as error:
        counting(method)
    assert error.value.fix == "add --medusa-choices auto"


def test_the_tree_of_the_report_can_be_given_to_run():
    method = counting(Medusa(draft_len=3))
    assert method.draft_len == 3
    assert tree_json(method, 2) is None and "too short" in tree_line(None)
    sequence = SimpleNamespace(sequence_id=1, tokens=[7])
    heads = np.array([[3, 8], [9, 4]])  # of two heads: the second is right at rank 1
    for token in (3, 4, 3, 4):
        method.accuracy.note(sequence, heads)
        sequence.tokens.append(token)
    found = tree_json(method, 2)
    assert found["num_rounds"] == 2
    # Rounds that began before a 3 are right: every other one.
    assert found["accuracy_by_head_and_rank"] == [[0.5, 0.0], [0.0, 0.5]]
    assert found["medusa_choices"] == [[0], [0, 1]]
    assert found["expected_tokens_per_round"] == pytest.approx(1.75)
    choices = tree_line(found).split('"')[1]
    assert parse_choices(choices).paths == ((0,), (0, 1))
