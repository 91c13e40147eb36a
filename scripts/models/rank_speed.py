"""Speed of 1, 2, 4 and 8 ranks, computed from what one GPU was measured to take.

    python -m scripts.models.rank_speed [--write docs/performance/tensor_parallel.md]

prints tables for Llama shapes in FP8 (16-bit head) on H200s, batch 1, 1,000 tokens of context; or
replaces those between the marks of a page. Steps of one token are those of cli/gpus.py (one rank)
and cli/rank_speed.py (several). Beside them:

- A verification takes longer than a step of one token by what was measured with 70B on one rank
  (`verify-growth` in docs/performance/h200.jsonl): so many microseconds a layer for so many tokens,
  on any number of ranks, since most of that is attention waiting and not reading.
- Drafts are right with one probability each, independently, so that a round of k drafts has
  (1 - p^(k+1)) / (1 - p) tokens. A draft engine has one rank or as many as the target, whichever
  makes rounds shorter; its steps are those of a model alone.
- A step of a ReDrafter head, in FP8, reads a rank's rows; ranks gather thrice and list likely ids.
- A round's time is that of its steps, 0.02 ms of the host, and nothing else. Prompts are left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from llmctl.builder.planted import STANDARD_ACCEPTANCE
from llmctl.builder.ranks import local_kv_heads, row_share
from llmctl.cli.gpus import GPUS, effective_read_bytes_s
from llmctl.cli.rank_speed import (
    Meeting,
    RankStep,
    head_meeting,
    head_time,
    listing_meeting,
    rank_time,
)
from llmctl.plugins.core.op_rules import RANK_COUNTS
from llmctl.plugins.fused.all_reduce_norm.spec import warps_of
from scripts.models.planted_shapes import SHAPES, Shape

REPOSITORY = Path(__file__).resolve().parents[2]
CARD = GPUS["h200"]
CONTEXT = 1000  # tokens in the KV cache
HOST_MS = 0.02  # of a round, docs/performance/h200.md
BESIDE_BYTES = 2_000_000_000  # activations, graphs and reserve, by `build --dry-run`
MOST_DRAFTS = 16
MARKS = ("<!-- computed: -->", "<!-- end of computed -->")
_GROWTH = re.compile(r"pair-.*?(?:-k(\d+))?-verify-growth")
Bounds = tuple[float, float]  # ms, at least and at most


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and what drafts for it; draft None: nothing."""

    target: str
    draft: str | None = None
    acceptance: float = STANDARD_ACCEPTANCE


@dataclass(frozen=True, slots=True)
class Round:
    """draft_ranks: of the draft engine. Times in ms; verify_ms: of drafts and one token."""

    draft_len: int
    draft_ranks: int
    draft_ms: Bounds
    verify_ms: Bounds
    tokens: float

    @property
    def round_ms(self) -> Bounds:
        """Drafts, verification, host."""
        low, high = (
            self.draft_len * draft + verify + HOST_MS
            for draft, verify in zip(self.draft_ms, self.verify_ms, strict=True)
        )
        return low, high


@dataclass(frozen=True, slots=True)
class Recurrent:
    """A target with a ReDrafter head. tokens: of a round, of planted heads of acceptance 0.65."""

    target: str
    num_beams: int
    length: int
    tokens: float


HEAD = Recurrent("70b", 4, 5, 3.49)
PAIRS = (Pair("70b"), Pair("70b", "1b"), Pair("405b"), Pair("405b", "8b"), Pair("8b"))


def read_bytes(shape: Shape, ranks: int) -> int:
    """What a rank reads in a step of one token: FP8 layers, its part of the 16-bit head, its KV
    cache in FP8."""
    kv_heads = local_kv_heads(shape.kv_heads, ranks)
    values = kv_heads * shape.head_size
    queries = shape.heads * shape.head_size // ranks
    layer = shape.hidden * (queries + 2 * values)  # q, k and v
    layer += shape.hidden * queries + 3 * shape.hidden * shape.intermediate // ranks
    layer += 2 * values * CONTEXT
    return shape.layers * layer + 2 * shape.hidden * head_rows(shape, ranks)


def head_rows(shape: Shape, ranks: int) -> int:
    """Rows of the output projection on a rank."""
    return shape.vocab if ranks == 1 else row_share(shape.vocab, ranks)


def weight_bytes(shape: Shape, ranks: int) -> int:
    """What a rank holds: the same without KV cache, and the embedding."""
    kv_bytes = 2 * local_kv_heads(shape.kv_heads, ranks) * shape.head_size * CONTEXT * shape.layers
    return read_bytes(shape, ranks) - kv_bytes + 2 * shape.vocab * shape.hidden


def recurrent_bytes(shape: Shape, ranks: int) -> int:
    """What a rank reads in a step of a ReDrafter head: its rows of W, U, two layers and the output
    projection."""
    width = 2 * shape.hidden
    rows = (2 * shape.hidden * shape.hidden + 2 * width * width) // ranks
    return rows + head_rows(shape, ranks) * width


def recurrent_ms(head: Recurrent, ranks: int) -> Bounds:
    """The draft part of a round: a step of one row, and others of a row for each beam."""
    shape = SHAPES[head.target]
    read, least, most = recurrent_bytes(shape, ranks), 0.0, 0.0
    for rows in (1, *[head.num_beams] * (head.length - 1)):
        gathered = (2 * rows * part * shape.hidden // ranks for part in (1, 2, 2))
        listed = listing_meeting(head_rows(shape, ranks), rows, head.num_beams)
        time = head_time(CARD, ranks, read, [*map(Meeting, gathered), listed])
        assert time is not None
        low, high = time.bounds_s
        least, most = least + 1e3 * low, most + 1e3 * high
    return least, most


def step_ms(shape: Shape, ranks: int, tokens: int = 1) -> Bounds:
    """A step of so many tokens of one sequence."""
    read = read_bytes(shape, ranks)
    more = 0.0 if tokens == 1 else 1e-3 * shape.layers * growth_us(tokens)
    if ranks == 1:
        speed = effective_read_bytes_s(CARD, read)
        assert speed is not None
        return 1e3 * read / speed + more, 1e3 * read / speed + more
    has_norm = warps_of(shape.hidden) is not None
    sums = [Meeting(4 * tokens * shape.hidden, has_norm=has_norm)] * (2 * shape.layers)
    best = head_meeting(head_rows(shape, ranks), tokens)
    time = rank_time(CARD, RankStep(ranks, shape.layers, read, [*sums, best]))
    assert time is not None
    low, high = time.bounds_s
    return 1e3 * low + more, 1e3 * high + more


@cache
def growth_us(tokens: int) -> float:
    """By how much a layer's share of a verification is longer than that of one token: a line
    through what was measured for 9, 11 and 14 tokens of 70B."""
    slope, start = np.polyfit(*zip(*_growths(), strict=True), 1)
    return float(start + slope * tokens)


def _growths() -> Iterator[tuple[int, float]]:
    lines = (REPOSITORY / "docs/performance/h200.jsonl").read_text().splitlines()
    rows = {row["name"]: row["value"] for row in map(json.loads, lines)}
    for name, percent in rows.items():
        found = _GROWTH.fullmatch(name)
        if found is not None:
            growth_ms = percent / 100 * rows["decode-70b"]
            yield int(found[1] or 10) + 1, 1e3 * growth_ms / SHAPES["70b"].layers


def best_round(pair: Pair, ranks: int, draft_len: int) -> Round:
    """A round of so many drafts, with the draft engine divided where that is faster."""
    assert pair.draft is not None
    verify = step_ms(SHAPES[pair.target], ranks, draft_len + 1)
    p = pair.acceptance
    tokens = (1 - p ** (draft_len + 1)) / (1 - p)
    rounds = [
        Round(draft_len, count, step_ms(SHAPES[pair.draft], count), verify, tokens)
        for count in sorted({1, ranks})
    ]
    return min(rounds, key=lambda found: sum(found.round_ms))


def best_length(pair: Pair, ranks: int) -> Round:
    """The round with the most tokens a second."""
    rounds = [best_round(pair, ranks, count) for count in range(1, MOST_DRAFTS + 1)]
    return max(rounds, key=lambda found: found.tokens / sum(found.round_ms))


def fits(pair: Pair, ranks: int) -> bool:
    """Whether the engines leave room for a KV cache."""
    engines = [pair.target, *([pair.draft] if pair.draft is not None else [])]
    weights = sum(weight_bytes(SHAPES[name], ranks) for name in engines)
    return weights + BESIDE_BYTES * len(engines) < CARD.memory_bytes


def span(bounds: Sequence[float]) -> str:
    """Both bounds in three digits or more, or the one that they are."""
    low, high = (f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in sorted(bounds))
    return low if low == high else f"{low} to {high}"


def rate(tokens: float, bounds: Bounds) -> str:
    """Tokens a second."""
    return span([1e3 * tokens / bound for bound in bounds])


def tables() -> Iterator[str]:
    """Markdown, line by line."""
    yield "| model | ranks | weights a rank, GB | step, ms | tok/s | times one rank |"
    yield "|---|---|---|---|---|---|"
    for pair in (pair for pair in PAIRS if pair.draft is None):
        yield from _plain_rows(pair)
    yield ""
    yield (
        "| pair | ranks | ranks of the draft | draft step, ms | verification of 11, ms | "
        "10 drafts: tok/s | best length | with it: tok/s |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for pair in (pair for pair in PAIRS if pair.draft is not None):
        yield from _pair_rows(pair)
    yield ""
    yield (
        "| with a ReDrafter head | ranks | weights of the head a rank, GB | draft part, ms | "
        "verification, ms | tok/s | times plain |"
    )
    yield "|---|---|---|---|---|---|---|"
    yield from _head_rows(HEAD)


def _head_rows(head: Recurrent) -> Iterator[str]:
    shape = SHAPES[head.target]
    name = f"{head.target}, {head.num_beams} beams of {head.length}"
    for ranks in RANK_COUNTS:
        draft = recurrent_ms(head, ranks)
        verify = step_ms(shape, ranks, head.num_beams * head.length + 1)
        whole = draft[0] + verify[0] + HOST_MS, draft[1] + verify[1] + HOST_MS
        held = f"{recurrent_bytes(shape, ranks) / 1e9:.2f}"
        times = f"{head.tokens * sum(step_ms(shape, ranks)) / sum(whole):.2f}"
        took = f"{span(draft)} | {span(verify)} | {rate(head.tokens, whole)}"
        yield f"| {name} | {ranks} | {held} | {took} | {times} |"


def _plain_rows(pair: Pair) -> Iterator[str]:
    shape = SHAPES[pair.target]
    alone = sum(step_ms(shape, 1))
    for ranks in RANK_COUNTS:
        held = f"{weight_bytes(shape, ranks) / 1e9:.1f}"
        if not fits(pair, ranks):
            yield f"| {pair.target} | {ranks} | {held} | does not fit | | |"
            continue
        step = step_ms(shape, ranks)
        times = f" {alone / sum(step):.2f}" if fits(pair, 1) else ""
        yield f"| {pair.target} | {ranks} | {held} | {span(step)} | {rate(1, step)} |{times} |"


def _pair_rows(pair: Pair) -> Iterator[str]:
    name = f"{pair.target} + {pair.draft}"
    for ranks in RANK_COUNTS:
        if not fits(pair, ranks):
            yield f"| {name} | {ranks} | does not fit | | | | | |"
            continue
        ten, best = best_round(pair, ranks, 10), best_length(pair, ranks)
        yield (
            f"| {name} | {ranks} | {ten.draft_ranks} | {span(ten.draft_ms)} | "
            f"{span(ten.verify_ms)} | {rate(ten.tokens, ten.round_ms)} | {best.draft_len} | "
            f"{rate(best.tokens, best.round_ms)} |"
        )


def write(page: str) -> str:
    """The page with its tables computed anew."""
    before, mark, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    assert mark and end, f"the page lacks {MARKS}"
    return "\n".join([before + mark, "", *tables(), "", end + after])


def main() -> None:
    """Print, or write into a page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", type=Path, help="page whose tables to replace")
    arguments = parser.parse_args()
    if arguments.write is None:
        print("\n".join(tables()))
    else:
        arguments.write.write_text(write(arguments.write.read_text()))


if __name__ == "__main__":
    main()
