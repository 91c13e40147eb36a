"""--tune-tree: the tree of drafts that a load calls for, from how often its heads were right."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmctl.errors import BadConfig
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod

if TYPE_CHECKING:
    from llmctl.runtime.drafting.medusa.accuracy import HeadAccuracy


def counting(method: DraftMethod) -> Medusa:
    """The method, counting what its heads say. Raises BadConfig for one without heads."""
    from llmctl.runtime.drafting.medusa.accuracy import HeadAccuracy

    if not isinstance(method, Medusa):
        raise BadConfig(
            f"--tune-tree is about the trees of Medusa heads; the draft method is {method.name}",
            fix="add --medusa-choices auto",
        )
    return replace(method, accuracy=HeadAccuracy())


def tree_json(method: DraftMethod, num_nodes: int) -> Mapping[str, Any] | None:
    """`tree` of the report: the best one of so many drafts; None where no round was counted."""
    from llmctl.runtime.drafting.medusa.accuracy import best_tree

    assert isinstance(method, Medusa) and method.accuracy is not None, "see counting"
    accuracy: HeadAccuracy = method.accuracy
    if not accuracy.num_rounds:
        return None
    tree, expected = best_tree(accuracy.shares, num_nodes)
    return {
        "medusa_choices": [list(path) for path in tree.paths],
        "expected_tokens_per_round": expected,
        "num_rounds": accuracy.num_rounds,
        "accuracy_by_head_and_rank": accuracy.shares.round(4).tolist(),
    }


def tree_line(tree: Mapping[str, Any] | None) -> str:
    """What a reader takes away: the value of --medusa-choices."""
    if tree is None:
        return "no tree: outputs were too short to tell whether heads were right"
    choices = str(tree["medusa_choices"]).replace(" ", "")
    return (
        f"the best tree of {len(tree['medusa_choices'])} drafts by {tree['num_rounds']} rounds, "
        f"{tree['expected_tokens_per_round']:.2f} tokens a round expected: "
        f'--medusa-choices "{choices}"'
    )
