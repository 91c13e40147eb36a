"""How a program finds the best ids of logits in steps of which nothing else is wanted: ranks take
them of their shares, and on one rank the product of many rows keeps them and stores no logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from llmctl.plugins.backends.cuda.kernel_spec import Launch, LaunchEnv
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear import best
from llmctl.plugins.ops.packed_linear.arguments import best_keys
from llmctl.plugins.ops.rank_argmax import kernel as rank_argmax

if TYPE_CHECKING:
    import torch


class BestIds:
    """Of the logits of a program's calls."""

    def __init__(self, calls: Iterable[OpCall]) -> None:
        """calls: those that launch llmctl's kernels."""
        calls = list(calls)
        self.gathering = next((call for call in calls if call.op == "all_gather"), None)
        products = [call for call in calls if best.can_keep_best(call)]
        # Several are those of heads, whose logits are read whole.
        has_one = self.gathering is None and len(products) == 1
        self.product = products[0] if has_one else None

    def reserve(self, env: LaunchEnv) -> None:
        """Ask for memory, which a graph that is captured cannot."""
        if self.product is not None:
            best_keys(self.product, env)

    def are_kept(self, rows: int) -> bool:
        """Whether a step of so many rows that is told so keeps the best ids instead of logits."""
        return self.product is not None and best.keeps_best(self.product, rows)

    def launch(
        self, env: LaunchEnv, out: torch.Tensor, rows: int, *, stride: int, offset: int
    ) -> Launch:
        """out[r * stride + offset] = the best id of each row of the last step, which was told."""
        if self.gathering is not None:
            return rank_argmax.launch(self.gathering, env, out, rows, stride=stride, offset=offset)
        assert self.product is not None and self.are_kept(rows), "logits are where they were"
        return best.take_launch(self.product, env, out, rows, stride=stride, offset=offset)
