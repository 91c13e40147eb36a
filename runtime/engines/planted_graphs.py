"""What the graphs of a planted engine say, and which of their weights must not interfere.

The base graph's output projection gives the planted text; that of a draft engine has a second
likeliest token, too, for trees. Draft heads read the code of a token x
and know the text too: what follows x after so many tokens is a head's likeliest token with the
given probability p, its second likeliest with p (1 - p), and else neither, independently for each
token and head. So the tokens that a round accepts are a known number for every tree. A step of a
recurrent head says the same of what follows the token that it takes in, whose code is its state; so
does one of an EAGLE head, whose attention hands on the code of the token itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.builder.engine_format import (
    BASE,
    EAGLE_EXTEND,
    EAGLE_NEXT,
    MEDUSA_GRAPH,
    REDRAFTER_FIRST,
    REDRAFTER_NEXT,
    PlanGraph,
    medusa_logits,
)
from llmctl.runtime.engines.planted_text import (
    Recipe,
    head_tokens,
    next_tokens,
    second_tokens,
    step_tokens,
)

Rows = Callable[[int, int], torch.Tensor]
"""(start, stop) -> these rows of a weight, [stop - start, columns]; of multiples of 1/2 up to 1.5,
which every format stores exactly. `stop` may lie behind the last row: what is there is zero."""
SHARP = 1.5  # factor of q and k that a token attends to itself with
SECOND = 0.5  # logit of a head's second likeliest token, as a part of the likeliest's


@dataclass(frozen=True, slots=True)
class Codes:
    """The embedding of a planted model: a code of signs for each token."""

    embedding: torch.Tensor  # [vocab, hidden]

    def rows(self, *shares: tuple[float, NDArray[np.int64]]) -> Rows:
        """Rows of an output projection. share: (factor, follows): the row of token follows[x] has
        the code of x, times the factor; -1: nothing follows x."""
        parts = [(factor, torch.from_numpy(_inverse(follows))) for factor, follows in shares]

        def made(start: int, stop: int) -> torch.Tensor:
            rows = self.embedding.new_zeros((stop - start, self.embedding.shape[1]))
            for factor, before in parts:
                wanted = before[start:stop].to(rows.device)
                codes = self.embedding[wanted.clamp(min=0)] * (factor * (wanted >= 0)[:, None])
                rows[: len(wanted)] += codes.to(rows.dtype)
            return rows

        return made

    def picks(self, columns: NDArray[np.int64], factors: NDArray[np.float64], width: int) -> Rows:
        """Rows [width] that each take one column, times a factor."""
        device = self.embedding.device
        places, values = torch.from_numpy(columns).to(device), torch.from_numpy(factors).to(device)

        def made(start: int, stop: int) -> torch.Tensor:
            rows = self.embedding.new_zeros((stop - start, width))
            own = places[start:stop, None]
            rows[: len(own)].scatter_(1, own, values[start:stop, None].to(rows.dtype))
            return rows

        return made


@dataclass(frozen=True, slots=True)
class PlantedGraph:
    """One graph. inert: endings of the names of linears and norms whose output is added to a code
    and must not change it. rows: the weights that are not random, by the names of their
    operators."""

    inert: tuple[str, ...]
    rows: Callable[[Recipe, PlanGraph, Codes], Mapping[str, Rows]]


def _inverse(follows: NDArray[np.int64]) -> NDArray[np.int64]:
    tokens = np.flatnonzero(follows >= 0)
    before = np.full(len(follows), -1, np.int64)
    before[follows[tokens]] = tokens
    return before


def _writer(graph: PlanGraph, output: str) -> str:
    """The name of the operator that computes an output."""
    (name,) = [op.name for op in graph.ops if op.outputs.get("out") == graph.outputs[output]]
    return name


def base_shares(weights: Recipe) -> list[tuple[float, NDArray[np.int64]]]:
    """What the output projection of the base graph says; see `Codes.rows`."""
    shares = [(1.0, next_tokens(weights))]
    return shares if weights["role"] == "target" else [*shares, (SECOND, second_tokens(weights))]


def _base(weights: Recipe, graph: PlanGraph, codes: Codes) -> Mapping[str, Rows]:
    return {_writer(graph, "logits"): codes.rows(*base_shares(weights))}


def _medusa(weights: Recipe, graph: PlanGraph, codes: Codes) -> Mapping[str, Rows]:
    found = {}
    for head in range(len(graph.outputs)):
        if medusa_logits(head) not in graph.outputs:  # beside them a rank puts out its shares
            break
        likeliest, second = head_tokens(weights, head)
        name = _writer(graph, medusa_logits(head))
        found[name] = codes.rows((1.0, likeliest), (SECOND, second))
    return found


def _recurrent(weights: Recipe, graph: PlanGraph, codes: Codes) -> Mapping[str, Rows]:
    """Tokens are taken in as they are, so that the state is the code of the last one, activated;
    the hidden state beside it is not read."""
    likeliest, second = step_tokens(weights)
    said = codes.rows((1.0, likeliest), (SECOND, second))
    width = codes.embedding.shape[1]
    (taken,) = [op.name for op in graph.ops if op.name.endswith(".rnn_w")]

    def identity(start: int, stop: int) -> torch.Tensor:
        return torch.eye(stop, width, device=codes.embedding.device)[start:]

    def behind(start: int, stop: int) -> torch.Tensor:
        rows = said(start, stop)
        return torch.cat((torch.zeros_like(rows), rows), dim=1)

    return {taken: identity, _writer(graph, "logits"): behind}


def _attending(weights: Recipe, graph: PlanGraph, codes: Codes) -> Mapping[str, Rows]:
    """q and k of each head are some signs of the token's code, so that it attends to itself: with
    64 signs 18 is the logarithm of its share, with 128 it is 25, other tokens' is 2 at a standard
    deviation. v has these signs, too, and the output projection puts them where they were."""
    (attention,) = [op.attributes for op in graph.ops if op.op == "paged_attention"]
    heads, kv_heads, size = (
        int(attention[name]) for name in ("num_heads", "num_kv_heads", "head_size")
    )
    width, groups = codes.embedding.shape[1], heads // kv_heads
    signs = np.arange(kv_heads * size) % width
    of_head = signs.reshape(kv_heads, size)
    q_and_k = np.concatenate((of_head.repeat(groups, 0), of_head)).ravel()
    factors = np.repeat((SHARP, 1.0), (len(q_and_k), len(signs)))
    head = np.arange(kv_heads).repeat(size) * groups * size  # the first that reads its values
    taken = (head + np.arange(len(signs)) % size)[:width]
    columns = np.concatenate((q_and_k, signs))
    likeliest, second = step_tokens(weights)
    return {
        _named(graph, ".qkv_proj"): codes.picks(columns, factors, 2 * width),
        _named(graph, ".o_proj"): codes.picks(taken, np.ones(len(taken)), heads * size),
        _named(graph, ".lm_head"): codes.rows((1.0, likeliest), (SECOND, second)),
    }


def _named(graph: PlanGraph, ending: str) -> str:
    (name,) = [op.name for op in graph.ops if op.name.endswith(ending)]
    return name


_RECURRENT = PlantedGraph((".rnn_u", ".linear"), _recurrent)
_ATTENDING = PlantedGraph((".hidden_norm", ".down_proj"), _attending)
PLANTED_GRAPHS = {
    BASE: PlantedGraph(("o_proj", "down_proj"), _base),
    MEDUSA_GRAPH: PlantedGraph((".linear",), _medusa),
    REDRAFTER_FIRST: _RECURRENT,
    REDRAFTER_NEXT: _RECURRENT,
    EAGLE_EXTEND: _ATTENDING,
    EAGLE_NEXT: _ATTENDING,
}
