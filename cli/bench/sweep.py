"""Which draft length, or which tree? Measured speed, for lengths next to the prediction of a cost
model.

The model is speed(k) = E(k) / (k * t_draft + t_verify(k) + t_rest(k)) with E(k) = 1 + the sum of
the acceptance rates of positions 1 to k. It is calibrated on the shortest and the longest length
measured: rates and t_draft are those of the longest, t_verify and t_rest are interpolated linearly.
The lengths in between are predictions; where they are wrong, time or acceptance does not change
linearly. Trees are only measured.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from llmctl.cli.bench.records import Recording
from llmctl.cli.run.drafting import parse_method
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.draft_engine.tree import parse_tree
from llmctl.runtime.drafting.method import DraftMethod

TREES = "--sweep-draft-tree"
MOST_LENGTHS = 64
# lengths this close to the fastest count as equal; the shortest of them is recommended
CLOSE = 0.99
# Rounds of a length for the average of its accepted drafts to be repeatable: their standard
# deviation is about half of it, so 100 rounds leave 5 %.
ENOUGH_ROUNDS = 100


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured besides plain decoding: draft lengths, and trees of the draft engine by
    their names. option: which asked for it; "": none."""

    lengths: tuple[int, ...] = ()
    trees: Mapping[str, DraftMethod] = field(default_factory=dict)
    option: str = ""

    @property
    def most_drafts(self) -> int:
        """Of any of them."""
        return max(self.lengths + tuple(method.draft_len or 0 for method in self.trees.values()))


def parse_sweep(given: Mapping[str, Any]) -> Sweep:
    """From the options of the command line. Raises BadConfig."""
    lengths, trees = given["sweep_draft_len"], given["sweep_draft_tree"]
    if lengths is None and trees is None:
        return Sweep()
    option = "--sweep-draft-len" if trees is None else TREES
    if trees is not None and given["draft_engine"] is None:
        raise BadConfig(
            f"{TREES} is about the trees of a draft engine, and there is none",
            fix="add --draft-engine DIR",
        )
    if given["draft_tree"] is not None:
        raise BadConfig(
            f"{option} and --draft-tree are both given", fix=f"{TREES} takes the trees to measure"
        )
    found: dict[str, DraftMethod] = {}
    for text in [] if trees is None else trees.split(";"):
        tree = parse_tree(text)
        method = parse_method({**given, "draft_tree": str(tree)}, tree.nodes, is_adaptive=False)
        found[str(tree)] = method
    if len(found) > MOST_LENGTHS:
        raise BadConfig(f"{TREES} has {len(found)} trees; {MOST_LENGTHS} are measured at most")
    return Sweep(() if lengths is None else parse_lengths(lengths), found, option)


def parse_lengths(text: str) -> tuple[int, ...]:
    """ "1..16" or "1,2,4,8": draft lengths, ascending. Raises BadConfig."""
    span = re.fullmatch(r"\s*(\d+)\s*\.\.\s*(\d+)\s*", text)
    if span is not None:
        least, most = int(span[1]), int(span[2])
        lengths = set(range(least, min(most, least + MOST_LENGTHS) + 1))
    elif re.fullmatch(r"\s*\d+(\s*,\s*\d+)*\s*", text):
        lengths = set(map(int, text.split(",")))
    else:
        lengths = set()
    if not lengths or min(lengths) < 1 or len(lengths) > MOST_LENGTHS:
        raise BadConfig(
            f"--sweep-draft-len is {text!r}; draft lengths such as 1..16 or 1,2,4,8 are wanted, "
            f"{MOST_LENGTHS} at most"
        )
    return tuple(sorted(lengths))


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements of one draft length, or of a tree. Times are means over steps that only
    generate."""

    draft_len: int
    decode_tok_s: float  # per user: output tokens after the first / time after the first
    round_ms: float  # between responses of a request
    draft_ms: float
    verify_ms: float
    acceptance_length: float
    rates: tuple[float, ...]  # fraction of rounds that accepted draft i
    num_rounds: int  # that acceptance is an average of; plain steps
    tree: str | None = None

    @property
    def rest_ms(self) -> float:
        """What of a round is neither drafting nor verification."""
        return self.round_ms - self.draft_ms - self.verify_ms


def measure_point(draft_len: int, recording: Recording, tree: str | None = None) -> Point | None:
    """The figures of a length or tree; None where the requests had not two rounds together, or no
    time passed between the responses of any."""
    done = [item for item in recording.done if len(item.arrivals) > 1]
    steps = [s for s in recording.steps if s.rounds and not s.context_requests]
    gaps = sum(len(item.arrivals) - 1 for item in done)
    if gaps < 2 or not steps:
        return None
    spans_s = sum(item.arrivals[-1].at_s - item.arrivals[0].at_s for item in done)
    if not spans_s:  # a short output whose responses were taken together
        return None
    tokens = sum(len(item.output_ids) - item.arrivals[0].num_tokens for item in done)
    rounds = [item for step in recording.steps for item in step.rounds]
    rates = []
    for position in range(draft_len):
        asked = [item for item in rounds if item.draft_depth > position]
        kept = sum(item.accepted_tokens > position for item in asked)
        rates.append(kept / len(asked) if asked else 0.0)
    return Point(
        draft_len=draft_len,
        decode_tok_s=tokens / spans_s,
        round_ms=spans_s * 1e3 / gaps,
        draft_ms=sum(s.draft_ms for s in steps) / len(steps),
        verify_ms=sum(s.verify_ms for s in steps) / len(steps),
        acceptance_length=1 + sum(item.accepted_tokens for item in rounds) / len(rounds),
        rates=tuple(rates),
        num_rounds=len(rounds),
        tree=tree,
    )


def predict(points: Sequence[Point], draft_len: int) -> float:
    """tok/s at a length, by the model; `points` are sorted by length and at least two."""
    shortest, longest = points[0], points[-1]
    share = (draft_len - shortest.draft_len) / (longest.draft_len - shortest.draft_len)
    verify_ms = shortest.verify_ms + share * (longest.verify_ms - shortest.verify_ms)
    rest_ms = shortest.rest_ms + share * (longest.rest_ms - shortest.rest_ms)
    draft_ms = draft_len * longest.draft_ms / longest.draft_len
    tokens = 1 + sum(longest.rates[:draft_len])
    return tokens * 1e3 / (draft_ms + verify_ms + rest_ms)


def recommend(points: Sequence[Point]) -> Point:
    """The shortest length within CLOSE of the fastest, 0 being not to draft at all; the fastest
    tree where no length is."""
    fastest = max(points, key=lambda point: point.decode_tok_s)
    close = [
        point
        for point in points
        if point.tree is None and point.decode_tok_s >= CLOSE * fastest.decode_tok_s
    ]
    return min(close, key=lambda point: point.draft_len, default=fastest)


def sweep_json(points: Sequence[Point]) -> dict[str, Any] | None:
    """The sweep's part of the report; None before two ways were measured. The cost model is told
    for two lengths and more, plain decoding included."""
    chains = sorted((p for p in points if p.tree is None), key=lambda point: point.draft_len)
    trees = [point for point in points if point.tree is not None]
    if len(points) < 2 or not chains:
        return None
    chosen = recommend(points)
    found: dict[str, Any] = {
        "rows": [_row(point, chains) for point in chains],
        "tree_rows": [_row(point, ()) for point in trees],
        "recommended_draft_len": chosen.draft_len,
        "recommended_draft_tree": chosen.tree,
        "fewest_rounds": min(point.num_rounds for point in points),
    }
    if len(chains) > 1:
        rows = found["rows"]
        found |= {
            "calibrated_on_draft_lens": [chains[0].draft_len, chains[-1].draft_len],
            "draft_step_ms": chains[-1].draft_ms / chains[-1].draft_len,
            "acceptance_at_position": list(chains[-1].rates),
            "model_recommends_draft_len": max(rows, key=lambda r: r["predicted_tok_s"])[
                "draft_len"
            ],
        }
    return found


def _row(point: Point, chains: Sequence[Point]) -> dict[str, Any]:
    row = asdict(point)
    del row["rates"]
    if point.tree is None:
        del row["tree"]
    if len(chains) > 1:
        predicted = predict(chains, point.draft_len)
        row["predicted_tok_s"] = predicted
        row["prediction_error_share"] = predicted / point.decode_tok_s - 1
    return row
