"""Drafts accepted at random instead of by comparison, to measure speed at a chosen acceptance.

Only for benchmarks: the text is meaningless, its speed is that of a draft with this acceptance. The
definition is vLLM's ("rejection_sample_method": "synthetic"): rates[i] is the probability that the
first i + 1 drafts of a round are all accepted; after them comes the target's own token.

The draws are a table made once; a round uses the entry selected by its request's last token and
length. So host and device agree, and a run can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from llmctl.errors import BadConfig
from llmctl.plugins.device_loop.state import RoundState
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.drafts import Drafts
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.kv_cache import KvCacheManager
from llmctl.runtime.request import Batch, Request, Sequence

NUM_DRAWS = 1 << 16
_LENGTH_STRIDE, _TOKEN_STRIDE = 40_503, 30_011  # odd: adjacent values get distant draws


@dataclass(frozen=True)
class SyntheticAcceptance:
    """rates [draft_len], non-increasing; the seed of the draws. Raises BadConfig."""

    rates: tuple[float, ...]
    seed: int = 0
    accepted_drafts: NDArray[np.int32] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        rates = np.array(self.rates, float)
        if not rates.size or not np.all((rates >= 0) & (rates <= 1)) or np.any(np.diff(rates) > 0):
            raise BadConfig(
                f"the synthetic acceptance rates are {list(self.rates)}; each must be in [0, 1] "
                "and none above the one before it"
            )
        # A draw u keeps draft i where u < rates[i]: with probability rates[i], and i - 1 as well.
        draws = np.random.default_rng(self.seed).random(NUM_DRAWS)
        accepted = (draws[:, None] < rates).sum(axis=1).astype(np.int32)
        object.__setattr__(self, "accepted_drafts", accepted)

    @classmethod
    def from_length(cls, length: float, draft_len: int, seed: int = 0) -> SyntheticAcceptance:
        """Rates whose mean tokens per round, including the target's own, are `length`, with the
        least possible spread: certain drafts first, then one with a fractional probability, then
        none. The same as vLLM's."""
        if not 1 <= length <= draft_len + 1:
            raise BadConfig(
                f"the synthetic acceptance length is {length}; with {draft_len} drafts per round "
                f"it must be in [1, {draft_len + 1}]"
            )
        return cls(
            tuple(min(1.0, max(0.0, length - 1 - index)) for index in range(draft_len)), seed
        )

    @property
    def length(self) -> float:
        """Mean tokens per round."""
        return 1 + sum(self.rates)

    def accepted(self, sequence: Sequence) -> int:
        """Drafts that are accepted in the next round of a sequence."""
        place = len(sequence.tokens) * _LENGTH_STRIDE + sequence.tokens[-1] * _TOKEN_STRIDE
        return int(self.accepted_drafts[place % NUM_DRAWS])


class SyntheticDrafter:
    """A drafter whose drafts are accepted at random."""

    def __init__(self, drafter: Drafter, acceptance: SyntheticAcceptance) -> None:
        self.max_draft_len = drafter.max_draft_len
        self.holders = drafter.holders
        self._drafter = drafter
        self._acceptance = acceptance

    def check(self, request: Request) -> None:
        """See Drafter, as for all that follow."""
        self._drafter.check(request)

    def prepare(self, kv_cache: KvCacheManager, sampler: Sampler, keep_probs: bool) -> None:
        self._drafter.prepare(kv_cache, sampler, keep_probs)

    def propose(self, batch: Batch) -> list[Drafts]:
        drafts = self._drafter.propose(batch)
        for item, proposed in zip(batch.generation, drafts, strict=True):
            wanted = self._acceptance.accepted(item.sequence)
            proposed.num_forced = min(wanted, len(proposed.tokens))
        return drafts

    def commit(self, batch: Batch, accepted: Items[int], drawn: Items[int]) -> None:
        self._drafter.commit(batch, accepted, drawn)

    def release(self, sequence: Sequence) -> None:
        self._drafter.release(sequence)


FORCE_LAUNCHES = 24  # the most kernels that `force` enqueues


class DeviceAcceptanceDraws:
    """The same draws for device rounds: it overwrites the tokens that the target drew."""

    def __init__(self, acceptance: SyntheticAcceptance, device: torch.device | str) -> None:
        self._table = torch.from_numpy(acceptance.accepted_drafts).to(device)

    def force(self, state: RoundState, batch: int, draft_len: int) -> None:
        """Make the target's tokens equal the drafts to be accepted, and the next one differ.
        Enqueues on the current stream, between the target's draws and acceptance."""
        length, last = state.committed[:batch].long(), state.root[:batch].long()
        place = length * _LENGTH_STRIDE + last * _TOKEN_STRIDE
        accepted = self._table[place % NUM_DRAWS]
        drafts = state.drafts[:batch, :draft_len]
        targets = state.targets[: batch * (draft_len + 1)].view(batch, draft_len + 1)[:, :-1]
        index = torch.arange(draft_len, dtype=torch.int32, device=self._table.device)
        is_accepted = index < accepted[:, None]
        other = torch.where(targets == drafts, (drafts - 1).abs(), targets)
        targets.copy_(torch.where(is_accepted, drafts, other))
