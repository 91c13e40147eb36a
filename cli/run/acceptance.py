"""Which rule accepts the drafts of each row: asked before weights are loaded, and reported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from llmctl.cli.run.drafting import require_drafts
from llmctl.cli.run.generate import Row
from llmctl.errors import BadConfig
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.request import Request

TYPICAL = "typical"  # the rule that changes what text is likely
LINES = {
    "logits": "by logits: {} of {} requests have the target's distribution, and other tokens than "
    "without drafts",
    TYPICAL: "lossy: {} of {} requests are accepted typically; their text is neither that of plain "
    "decoding nor of its distribution",
}


def check_rules(method: DraftMethod, rows: Sequence[Row], *, is_verifying: bool) -> None:
    """Refuse rules that contradict each other or have no effect, and a comparison (--verify-exact)
    where drafts may change tokens by design. Raises BadConfig."""
    configs = [row.request.sampling_config for row in rows if row.request]
    if any(config.typical_acceptance for config in configs):
        require_drafts("--typical-acceptance is about drafts, and there are none", method)
        if method.acceptance != "tokens":
            raise BadConfig(
                f"--typical-acceptance and acceptance by {method.acceptance} are both requested",
                fix="set use_logits to False in --draft-target-model-config",
            )
        if all(config.is_greedy for config in configs):
            raise BadConfig(
                "--typical-acceptance is for sampled requests, and all are greedy",
                fix="add --temperature, or leave --typical-acceptance out",
            )
    if is_verifying:
        _require_comparable(method, rows)


def idle_rule(method: DraftMethod, requests: Sequence[Request]) -> str | None:
    """A line for people where acceptance by logits is asked for, and no request has any."""
    if method.acceptance == "tokens" or not all(r.sampling_config.is_greedy for r in requests):
        return None
    return "use_logits changes nothing: all requests are greedy, so drafts are accepted by tokens"


def idle_copies(requests: Sequence[Request]) -> str | None:
    """A line for people where several outputs are asked for, and none can differ."""
    configs = [request.sampling_config for request in requests]
    if all(c.is_greedy for c in configs) and any(c.num_return_sequences > 1 for c in configs):
        return "all requests are greedy, so the outputs of a prompt are all the same"
    return None


def _require_comparable(method: DraftMethod, rows: Sequence[Row]) -> None:
    counts = rules(method, rows)
    if counts.get(TYPICAL):
        raise BadConfig(
            "--verify-exact needs acceptance by tokens: accepted typically, sampled outputs have "
            "other tokens",
            fix="leave out --typical-acceptance",
        )
    if counts.get("logits"):
        raise BadConfig(
            "--verify-exact needs acceptance by tokens: accepted by logits, sampled outputs "
            "have the right distribution and other tokens",
            fix="set use_logits to False in --draft-target-model-config",
        )


def rules(method: DraftMethod, rows: Sequence[Row]) -> Mapping[str, int]:
    """How many requests are accepted by each rule: tokens, logits, typical."""
    configs = [row.request.sampling_config for row in rows if row.request]
    return Counter(
        "tokens" if config.is_greedy else TYPICAL if config.accepts_typical else method.acceptance
        for config in configs
    )


def rule_lines(counts: Mapping[str, int]) -> list[str]:
    """A line for people for each rule that changes tokens."""
    total = sum(counts.values())
    return [line.format(counts[rule], total) for rule, line in LINES.items() if counts.get(rule)]
