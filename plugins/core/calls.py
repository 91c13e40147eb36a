"""What a backend executes: resolved operator calls, and the integers that describe one step.

`OpCall` is a plan operator whose names became tensors; a `Program` is a list of them, ready to run
step after step. Which calls work on the packed tokens of a step and which on the rows that get
logits follows from the data flow: whatever is computed from the output of `gather_rows` has rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Extent = Literal["tokens", "rows"]


@dataclass(slots=True)
class Trees:
    """Which requests of a step compute tokens of a tree, and the paths of these.

    Verification computes a tree at once. All tokens that the request has in the step are its tree:
    the root, then every token after its parent. The key of token i is stored i places after the
    root's in the cache, whatever its position; its position is the root's plus its depth. So the
    key that token i sees at position d after the root's is that of token paths[start + i][d].

    A head that drafts a tree computes it over several steps. Then `roots` says where the root is,
    which an earlier step has stored, as it may have stored any token of a path; paths[start + i][d]
    is the place of a token after the root's, and that of token i itself is in `slot_mapping`.
    """

    start: NDArray[np.int32]  # [B] row of `paths` for the request's first token; -1: no tree
    # [P, W] a token's path: root (0) first, itself last; the rest is undefined
    paths: NDArray[np.int32]
    # [B] positions of roots that earlier steps stored; None: every root is in the step
    roots: NDArray[np.int32] | None = None


def tree_lens(step: StepInputs, trees: Trees) -> NDArray[np.int32]:
    """[B] keys of each request from its tree's root on."""
    return np.diff(step.cu_q) if trees.roots is None else step.kv_len - trees.roots


@dataclass(slots=True)
class StepInputs:
    """The packed tokens of one step, as C-contiguous int32 arrays.

    N tokens of B requests, context requests first; R rows get logits.
    """

    token_ids: NDArray[np.int32]  # [N]
    position_ids: NDArray[np.int32]  # [N] absolute position of each token in its request
    cu_q: NDArray[np.int32]  # [B + 1] prefix sums of tokens per request
    kv_len: NDArray[np.int32]  # [B] KV entries valid after this step wrote its own
    block_tables: NDArray[np.int32]  # [B, max_blocks] block ids; unused entries may be anything
    slot_mapping: NDArray[np.int32]  # [N] block_id * tokens_per_block + offset
    logit_rows: NDArray[np.int32]  # [R] indices into the packed tokens
    trees: Trees | None = None  # None: the tokens of every request follow one another
    # Of each row the best id is wanted and no logits, which ranks then do not gather. Asked only of
    # engines that have `shares_logits`.
    best_only: bool = False
    # [B] attention of tokens at positions before it has FP8 products (fp8_context.py); None: of no
    # token of the step. Asked only of engines whose prompts alone have these; a request that has
    # such tokens has at least a whole group of them in the step.
    context_end: NDArray[np.int32] | None = None

    @property
    def num_tokens(self) -> int:
        """N, the packed tokens of the step."""
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        """B, the requests of the step."""
        return len(self.kv_len)

    @property
    def num_rows(self) -> int:
        """R, the tokens whose logits are computed."""
        return len(self.logit_rows)


@dataclass(frozen=True, slots=True)
class OpCall:
    """A plan operator with its names resolved to tensors at their full (maximum) size.

    Roles, dtypes and shapes are those of the operator's `spec.py`. Activations have max_num_tokens
    (or max_num_rows) as their first dimension; a step uses the first N (or R) rows.
    """

    op: str
    name: str
    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    attributes: Mapping[str, int | float | str | bool]
    tactic: str = ""  # the kernel the builder chose, in the operator's own notation


class Program(Protocol):
    """A list of calls that a backend runs once per step."""

    def run(self, step: StepInputs, kv_cache: torch.Tensor) -> None:
        """Execute every call in order.

        kv_cache: [num_layers, num_blocks, 2, num_kv_heads, tokens_per_block, head_size].
        """


def row_extents(
    calls: Sequence[OpCall],
    stated: Mapping[str, Mapping[str, Extent]] | None = None,
    row_inputs: Sequence[torch.Tensor] = (),
) -> list[Extent]:
    """For each call, whether it processes the step's tokens or only the rows that get logits.

    Buffers are identified by their address, because activations share one arena: the last call that
    wrote to an address decides. `stated` gives the extents of the outputs by role for calls (by
    name) that define them; `row_inputs` have rows before the first call.
    """
    written: dict[int, Extent] = {tensor.data_ptr(): "rows" for tensor in row_inputs}
    extents: list[Extent] = []
    for call in calls:
        extent: Extent = "tokens"
        if call.op == "gather_rows":
            extent = "rows"
        elif "x" in call.inputs:
            extent = written.get(call.inputs["x"].data_ptr(), "tokens")
        extents.append(extent)
        own = (stated or {}).get(call.name, {})
        for role, tensor in call.outputs.items():
            written[tensor.data_ptr()] = own.get(role, extent)
    return extents
