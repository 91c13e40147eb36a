"""What a run reports on stderr: engines, speed, acceptance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from llmctl.cli.run.acceptance import TYPICAL, rule_lines
from llmctl.cli.run.generate import Row, SequenceOutput

if TYPE_CHECKING:
    from llmctl.builder.engine_format import EngineConfig
    from llmctl.runtime.engines.engine import Engine
    from llmctl.runtime.engines.opening import OpenedEngines
    from llmctl.runtime.kv_cache import KvCacheStats
    from llmctl.runtime.open import OpenEngines
    from llmctl.runtime.stats.counters import SpeculationStats

LOG_LEVELS = ("verbose", "info", "warning", "error", "internal_error")  # most to least


# A single time between responses may be next to nothing: it begins when the first of them was read,
# however late.
LEAST_GAPS = 2


@dataclass(frozen=True, slots=True)
class Decode:
    """What came after first tokens: tokens, and the time from the mean first to the last."""

    num_tokens: int
    span_s: float


@dataclass(frozen=True, slots=True)
class RunStats:
    """Speed of one batch. total_s runs from enqueueing it to its last response."""

    num_requests: int
    num_failed: int
    num_prompt_tokens: int
    num_output_tokens: int
    total_s: float
    time_to_first_token_s: float | None  # mean over requests
    decode: Decode | None
    draft_len: int  # 0: plain decoding
    speculation: SpeculationStats
    kv_cache: KvCacheStats | None = None  # as of the last step
    accepted_by: Mapping[str, int] = field(default_factory=dict)  # requests by rule

    def to_json(self) -> dict[str, Any]:
        """The "stats" of `run --json`."""
        rounds, has_drafts = self.speculation.rounds, self.speculation.draft_tokens > 0
        result: dict[str, Any] = {
            "num_requests": self.num_requests,
            "num_failed": self.num_failed,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_output_tokens": self.num_output_tokens,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
            "decode_tokens_per_s": self.decode_tokens_per_s,
            "time_to_first_token_s": self.time_to_first_token_s,
            "rounds": rounds,
            "verify_s": self.speculation.verify_s,
            "host_s": self.speculation.host_s,
        }
        if self.draft_len:
            result["speculation"] = {
                "draft_len": self.draft_len,
                "acceptance_rate": self.speculation.acceptance_rate if has_drafts else None,
                "tokens_per_round": self.speculation.acceptance_length if rounds else None,
                "draft_tokens": self.speculation.draft_tokens,
                "accepted_tokens": self.speculation.accepted_tokens,
                "accepted_at_position": self.accepted_at_position,
                "draft_s": self.speculation.draft_s,
                "accepted_by": dict(self.accepted_by),
                "is_lossy": TYPICAL in self.accepted_by,
            }
        if self.kv_cache is not None:
            result["kv_cache"] = asdict(self.kv_cache)
        return result

    @property
    def tokens_per_s(self) -> float:
        """Output tokens over the whole time, prompts included."""
        return self.num_output_tokens / self.total_s if self.total_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Output tokens after each output's first, over the time after the mean first token. None
        where no output had LEAST_GAPS, and where outputs waited for others."""
        return self.decode.num_tokens / self.decode.span_s if self.decode else None

    @property
    def accepted_at_position(self) -> list[float]:
        """Share of rounds that kept draft i."""
        rounds = self.speculation.rounds
        return [count / rounds for count in self.speculation.accepted_at_position] if rounds else []


def summarize(
    rows: Sequence[Row],
    total_s: float,
    draft_len: int,
    speculation: SpeculationStats,
    kv_cache: KvCacheStats | None = None,
    accepted_by: Mapping[str, int] | None = None,
) -> RunStats:
    """Statistics of rows that have ended."""
    done = [row for row in rows if row.error is None and row.request is not None]
    firsts = [row.first_token_s for row in done if row.first_token_s is not None]
    return RunStats(
        num_requests=len(rows),
        num_failed=len(rows) - len(done),
        num_prompt_tokens=sum(len(row.request.input_token_ids) for row in done if row.request),
        num_output_tokens=sum(row.num_new_tokens for row in done),
        total_s=total_s,
        time_to_first_token_s=sum(firsts) / len(firsts) if firsts else None,
        decode=_decode([sequence for row in done for sequence in row.sequences]),
        draft_len=draft_len,
        speculation=speculation,
        kv_cache=kv_cache,
        accepted_by=accepted_by or {},
    )


def _decode(outputs: Sequence[SequenceOutput]) -> Decode | None:
    """None where no output was written for long enough, or where outputs had to wait until others
    ended: what was written before the mean first token would count, but not its time."""
    firsts = [output.first_s for output in outputs if output.first_s is not None]
    if max((output.num_times for output in outputs), default=0) <= LEAST_GAPS:
        return None
    if max(firsts) > min(output.last_s for output in outputs if output.num_times > 1):
        return None
    return Decode(
        sum(output.num_tokens - output.num_first_tokens for output in outputs),
        max(output.last_s for output in outputs) - sum(firsts) / len(firsts),
    )


def stats_lines(stats: RunStats) -> list[str]:
    """A few lines for people."""
    spec = stats.speculation
    speed = f"{_count(stats.num_output_tokens, 'token')} in {stats.total_s:.3f} s"
    if spec.rounds:  # else nothing was read but prompts
        speed += f": {stats.tokens_per_s:.1f} tok/s"
    if stats.time_to_first_token_s is not None:
        then = stats.decode_tokens_per_s
        speed += f" (time to first token {stats.time_to_first_token_s * 1e3:.1f} ms"
        speed += ")" if then is None else f", then {then:.1f} tok/s)"
    lines = [speed]
    if stats.draft_len and spec.rounds:
        kept = ", ".join(f"{share:.2f}" for share in stats.accepted_at_position)
        if spec.draft_tokens:
            found = (
                f"acceptance {spec.acceptance_rate:.3f} of {_count(spec.draft_tokens, 'draft')}, "
                f"{spec.acceptance_length:.2f} tokens per round over {_count(spec.rounds, 'round')}"
                f" (draft_len {stats.draft_len}); kept at position: {kept}"
            )
        else:
            rounds = _count(spec.rounds, "round")
            found = f"nothing was drafted in {rounds} (draft_len {stats.draft_len})"
        lines += [found, *rule_lines(stats.accepted_by)]
    if spec.rounds:
        parts = {"draft": spec.draft_s, "verify": spec.verify_s, "host": spec.host_s}
        if not stats.draft_len:
            parts = {"target": spec.verify_s, "host": spec.host_s}
        each = ", ".join(f"{name} {s / spec.rounds * 1e3:.3f} ms" for name, s in parts.items())
        lines.append(f"per round: {each}")
    kv = stats.kv_cache
    if kv is not None and (kv.reused_tokens or kv.evicted_blocks):
        moved = f", {kv.onboarded_blocks} back from host memory" if kv.host_max_num_blocks else ""
        lines.append(
            f"KV cache: {kv.reused_tokens} of {kv.prompt_tokens} prompt tokens reused, "
            f"{kv.evicted_blocks} blocks evicted{moved}"
        )
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def engine_lines(engines: OpenEngines, *, is_verbose: bool) -> list[str]:
    """Which engines run, on what, with how much cache."""
    plan = engines.kv_plan
    opened = engines.opened
    lines = [_engine_line(role, engine, opened) for role, engine in opened.engines.items()]
    lines.append(
        f"KV cache: {plan.num_blocks} blocks of {engines.target.tokens_per_block} tokens, "
        f"{plan.total_bytes / 1e6:.1f} MB, limited by {plan.limited_by}"
    )
    if is_verbose:
        tactics = Counter((op.op, op.tactic) for op in engines.target.plan.ops)
        lines += [
            f"target kernel: {op}{f' ({tactic})' if tactic else ''} x{count}"
            for (op, tactic), count in sorted(tactics.items())
        ]
    return lines


def architecture(config: EngineConfig) -> str:
    """The model's class name in the checkpoint."""
    pretrained = config.pretrained_config
    found = (pretrained.get("architectures") or [pretrained.get("architecture", "?")])[0]
    return str(found)


def _engine_line(role: str, engine: Engine, opened: OpenedEngines) -> str:
    return (
        f"{role}: {architecture(engine.config)}, {engine.weight_bytes / 1e6:.1f} MB of weights, "
        f"{opened.facts(engine)}"
    )
