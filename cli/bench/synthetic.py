"""--synthetic-acceptance: vLLM's synthetic_acceptance_length or synthetic_acceptance_rates."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from llmctl.errors import BadConfig
from llmctl.runtime.generate.synthetic_acceptance import SyntheticAcceptance

NOTICE = "SYNTHETIC ACCEPTANCE: drafts are accepted at random; the text is meaningless"


@dataclass(frozen=True, slots=True)
class ForcedAcceptance:
    """The value of the option: mean tokens per round, or the rate of every position."""

    length: float | None
    rates: tuple[float, ...] | None
    seed: int

    def acceptance(self, draft_len: int) -> SyntheticAcceptance:
        """The random acceptance for rounds of `draft_len` drafts; if rates were given, the first
        ones. Raises BadConfig."""
        if self.length is not None:
            return SyntheticAcceptance.from_length(self.length, draft_len, self.seed)
        assert self.rates is not None
        return SyntheticAcceptance(self.rates[:draft_len], self.seed)

    def to_json(self) -> dict[str, Any]:
        """How it is marked in reports."""
        rates = list(self.rates) if self.rates is not None else None
        return {"acceptance_length": self.length, "acceptance_rates": rates, "note": NOTICE}


def parse_forced(text: str, most_drafts: int, *, is_sweep: bool, seed: int) -> ForcedAcceptance:
    """A number, mean tokens per round from 1 to draft_len + 1; or a list of draft_len rates, the
    i-th being the probability that the first i drafts are all accepted. Raises BadConfig."""
    try:
        value = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if isinstance(value, int | float) and not isinstance(value, bool):
        if is_sweep:
            raise BadConfig(
                f"--synthetic-acceptance {text} is a mean length, which changes with the draft "
                "length",
                fix=f"give {most_drafts} rates instead, as in [0.9,0.8,...]",
            )
        forced = ForcedAcceptance(float(value), None, seed)
    elif (
        isinstance(value, list)
        and len(value) == most_drafts
        and all(isinstance(item, int | float) for item in value)
    ):
        forced = ForcedAcceptance(None, tuple(map(float, value)), seed)
    else:
        raise BadConfig(
            f"--synthetic-acceptance is {text!r}; a mean length such as 3.5 is wanted, or a list "
            f"of {most_drafts} rates, one per draft"
        )
    forced.acceptance(most_drafts)  # raises if it is impossible
    return forced
