"""A device that runs rounds on the fake engines' caches."""

from __future__ import annotations

from types import SimpleNamespace

from llmctl.plugins.ops.sampling.reference import sample_rows
from llmctl.plugins.ops.sampling.spec import SamplingRow
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP
from llmctl.runtime.generate.sampler import is_by_logits
from llmctl.runtime.request import Sequence
from llmctl.runtime.rounds.rounds import RoundReport, RoundResult
from support.fake_engine import FakeEngine


class FakeRunner:
    """A device that runs rounds on the fake engines' caches, at once and by itself.

    Beyond the blocks it was given it writes nothing and draws nonsense, as a GPU does.
    """

    def __init__(self, target: FakeEngine, draft: FakeEngine | None, draft_len: int) -> None:
        self.target, self.draft = target, draft
        self.drafter = self  # what drafts is part of the fake
        self.draft_len = draft_len
        self.falls_behind = draft is not None
        self.max_batch_size = 4
        self.max_tokens = min(e.max_seq_len for e in (target, draft) if e is not None)
        self.in_flight: list[list[RoundResult]] = []
        self.num_begun = self.num_rounds = self.most_in_flight = self.num_caught_up = 0

    def can_run(self, sequence: Sequence) -> bool:
        request = sequence.request
        params = request.sampling_config
        if not is_by_logits(request) or request.output_config.return_log_probs:
            return False
        return request.end_id is None or sequence.num_new_tokens >= params.min_tokens

    def prepare(self, max_batch_size: int, max_num_tokens: int) -> None:
        pass

    def prepare_more(self) -> bool:
        assert not self.in_flight
        return False

    num_captured = 0

    def depth(self, draft_len: int) -> int:
        return draft_len

    def reads(self, draft_len: int) -> bool:
        return False

    def is_behind(self, sequence) -> bool:
        return self.draft is not None and sequence.kv_lens[DRAFT_GROUP] < len(sequence.tokens) - 2

    def note(self, sequence, committed, accepted, draft_len) -> None:
        if self.draft is not None:  # which never got the last draft
            valid = committed + min(accepted, draft_len - 1)
            sequence.kv_lens[DRAFT_GROUP] = min(valid, len(sequence.tokens) - 1)

    def catch_up(self, sequences) -> None:
        assert not self.in_flight
        self.num_caught_up += 1
        for sequence in sequences:
            end = len(sequence.tokens) - 2
            for position in range(sequence.kv_lens[DRAFT_GROUP], end):
                self._write(self.draft, sequence.block_table, position, sequence.tokens[position])
            sequence.kv_lens[DRAFT_GROUP] = end

    def begin(self, sequences) -> None:
        self.num_begun += 1
        self.state = [
            SimpleNamespace(
                params=s.request.sampling_config, seed=s.seed, last=s.tokens[-2:],
                committed=len(s.tokens), max_len=s.max_len,
            )
            for s in sequences
        ]  # fmt: skip

    def enqueue(self, block_tables, draft_len: int) -> None:
        assert 0 <= draft_len <= self.draft_len
        self.num_rounds += 1
        rounds = [
            self._round(state, list(table), draft_len)
            for state, table in zip(self.state, block_tables, strict=True)
        ]
        self.in_flight.append(rounds)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    def collect(self) -> RoundReport:
        return RoundReport(self.in_flight.pop(0), 0.001, 0.002)

    def abandon(self) -> None:
        self.in_flight.clear()

    def _round(self, state, table, draft_len: int) -> RoundResult:
        drafts: list[int] = []
        feed = list(enumerate(state.last, state.committed - 2))
        while self.draft is not None and len(drafts) < draft_len:
            for position, token in feed:
                self._write(self.draft, table, position, token)
            drafts.append(self._draw(self.draft, state, table, feed[-1][0]))
            feed = [(state.committed - 1 + len(drafts), drafts[-1])]
        tokens = []
        for index, token in enumerate([state.last[-1], *drafts]):
            self._write(self.target, table, state.committed - 1 + index, token)
            tokens.append(self._draw(self.target, state, table, state.committed - 1 + index))
        accepted, limit = 0, min(len(drafts), state.max_len - state.committed - 1)
        while accepted < limit and drafts[accepted] == tokens[accepted]:
            accepted += 1
        result = RoundResult(state.committed, tokens[: accepted + 1], max(0, limit))
        state.last = [*state.last, *result.tokens][-2:]
        state.committed += accepted + 1
        return result

    def _write(self, engine, table, position, token) -> None:
        block, offset = divmod(position, engine.tokens_per_block)
        if block < len(table):
            near = min(max(token, 0), engine.vocab_size - 1)  # below 0: drawn of NaN
            engine.cache[table[block] * engine.tokens_per_block + offset] = near

    def _draw(self, engine, state, table, position) -> int:
        if position >= len(table) * engine.tokens_per_block:
            return 7
        logits = engine.logits(engine.read(table, position + 1))[None, : self.target.vocab_size]
        row = SamplingRow(state.params, state.seed, position + 1)
        return int(sample_rows(logits, [row])[0])
