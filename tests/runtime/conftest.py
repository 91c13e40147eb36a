"""A model small enough to recompute by hand, a loop to drive it, and the plain answer.

The fake engine keeps token ids where a real one keeps K and V, and computes a row's logits from
what it reads back through the block table. So a wrong slot, a stale entry or a missing one changes
the output, or hits a slot that was never written.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from llmctl.plugins.ops.sampling.reference import ReferenceSampling, sample_rows
from llmctl.plugins.ops.sampling.spec import SamplingBackend, SamplingRow
from llmctl.runtime.drafting.cache_groups import DRAFT_GROUP, cache_groups
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.generate.sampler import Sampler, is_by_logits
from llmctl.runtime.generate.verify import Verifier
from llmctl.runtime.kv_cache import AttentionWindow, CopyKind, KvCacheManager
from llmctl.runtime.kv_cache.block_mover import BlockMover
from llmctl.runtime.loop import Loop
from llmctl.runtime.request import FinishReason, Request, Sequence
from llmctl.runtime.rounds.rounds import RoundReport, RoundResult, Rounds
from llmctl.runtime.schedule.scheduler import Limits, Scheduler, SchedulerConfig

MASK = 2**64 - 1
COEFFICIENTS = np.random.default_rng(0).integers(1, 2**63, 4096, dtype=np.uint64) | np.uint64(1)


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: uint64 -> uint64, well mixed."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def share(seed: int, count: int) -> np.ndarray:
    """`count` values in [0, 1) that follow from `seed`."""
    lanes = np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mix(lanes ^ np.uint64(seed)) >> np.uint64(11)) / 2.0**53


def fold(tokens: np.ndarray) -> int:
    """A number that changes with any token and its place."""
    products = (tokens.astype(np.uint64) + np.uint64(1)) * COEFFICIENTS[: len(tokens)]
    return int(mix(products.sum(dtype=np.uint64)[None])[0])


class FakeArrival:
    """Blocks that land some steps later, over whatever is there by then."""

    def __init__(self, engine: FakeEngine, device: np.ndarray) -> None:
        self.engine, self.device = engine, device
        self.steps_left = engine.steps_to_land
        self.contents: list[tuple[int, np.ndarray]] = []

    def is_done(self) -> bool:
        self.steps_left -= 1  # asked once a step
        if self.steps_left < 0:
            self.hold()
        return not self.contents

    def hold(self) -> None:
        """What was started before lands before."""
        for arrival in list(self.engine.under_way):
            for block, content in arrival.contents:
                self.device[block] = content
            arrival.contents.clear()
            self.engine.under_way.remove(arrival)
            if arrival is self:
                return


class FakeEngine:
    """Logits follow mostly from the last two tokens and a little from all of them.

    As a draft: with probability 1 - agreement, decided by the context, the logits are another
    row's, shifted by one id. `extra_vocab` ids beyond the common ones carry the highest logits.
    """

    def __init__(
        self,
        vocab_size: int = 23,
        max_seq_len: int = 96,
        max_batch_size: int = 8,
        max_num_tokens: int = 48,
        max_draft_len: int = 8,
        tokens_per_block: int = 4,
        agreement: float = 1.0,
        extra_vocab: int = 0,
        whole_context: float = 3.0,
        steps_to_land: int | None = None,
        is_asynchronous: bool = False,
    ) -> None:
        self.is_asynchronous = is_asynchronous
        self.common_vocab = vocab_size
        self.vocab_size = vocab_size + extra_vocab
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.max_draft_len = max_draft_len
        self.tokens_per_block = tokens_per_block
        self.agreement = agreement
        self.whole_context = whole_context
        self.num_runs = 0
        self.num_tokens: list[int] = []
        self.num_copies = 0
        self.fail_at: int | None = None
        self.fail_copies = False
        self.steps_to_land = steps_to_land  # of what comes from host memory; None: it is there
        self.onboards_aside = steps_to_land is not None
        self.under_way: list[FakeArrival] = []
        self._rows: dict[bytes, np.ndarray] = {}

    def allocate_kv_cache(self, num_blocks: int) -> None:
        self.cache = np.full(num_blocks * self.tokens_per_block, -1, np.int64)

    def allocate_host_blocks(self, num_blocks: int) -> None:
        self.host = np.full((num_blocks, self.tokens_per_block), -1, np.int64)

    def copy_blocks(self, copies):
        self.num_copies += len(copies)
        if self.fail_copies:
            raise RuntimeError("the copy broke")
        device = self.cache.reshape(-1, self.tokens_per_block)
        arrival = FakeArrival(self, device)
        for copy in copies:
            late = {block for item in self.under_way for block, _ in item.contents}
            is_late = copy.kind is CopyKind.ONBOARD and self.onboards_aside
            if not is_late and late & {copy.src_block, copy.dst_block}:
                self.under_way[-1].hold()  # a later copy finds what an earlier one brings
            source = self.host if copy.kind is CopyKind.ONBOARD else device
            destination = self.host if copy.kind is CopyKind.OFFLOAD else device
            if is_late:
                arrival.contents.append((copy.dst_block, source[copy.src_block].copy()))
                if arrival not in self.under_way:
                    self.under_way.append(arrival)
            else:
                destination[copy.dst_block] = source[copy.src_block]
        return arrival if arrival.contents else None

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """The row of logits after `tokens` [n]."""
        tokens = np.asarray(tokens, np.int64)
        known = self._rows.get(tokens.tobytes())
        if known is None:
            known = self._rows[tokens.tobytes()] = self._compute(tokens)
        return known

    def _compute(self, tokens: np.ndarray) -> np.ndarray:
        everything = fold(tokens)
        row = 8 * share(fold(tokens[-2:]), self.common_vocab)
        row += self.whole_context * share(everything, self.common_vocab)
        if share(everything ^ 0x5A5A, 1)[0] >= self.agreement:
            row = np.roll(row, 1)
        padding = np.full(self.vocab_size - self.common_vocab, 99.0)
        return np.concatenate([row, padding]).astype(np.float32)

    def run(self, step) -> np.ndarray:
        self.num_runs += 1
        self.num_tokens.append(len(step.token_ids))
        if self.num_runs == self.fail_at:
            raise RuntimeError("the engine broke")
        self._check(step)
        self.cache[step.slot_mapping] = step.token_ids
        rows = np.empty((len(step.logit_rows), self.vocab_size), np.float32)
        for index, row in enumerate(step.logit_rows):
            request = int(np.searchsorted(step.cu_q, row, side="right")) - 1
            length = int(step.position_ids[row]) + 1
            rows[index] = self.logits(self.read(step.block_tables[request], length))
        return rows

    def read(self, table, length: int, is_there=None) -> np.ndarray:
        """The first `length` cached tokens of a block table, which are all there, or those of a
        mask [length]."""
        positions = np.arange(length)
        size = self.tokens_per_block
        tokens = self.cache[
            np.asarray(table, np.int64)[positions // size] * size + positions % size
        ]
        known = tokens if is_there is None else tokens[is_there]
        assert (known >= 0).all(), "a slot that was never written"
        return tokens

    def _check(self, step) -> None:
        """What every backend relies on."""
        for name in step.__slots__:
            array = getattr(step, name)
            assert array.dtype == np.int32 and array.flags.c_contiguous, name
        counts = np.diff(step.cu_q)
        assert len(step.token_ids) == step.cu_q[-1] <= self.max_num_tokens
        assert 0 < len(counts) <= self.max_batch_size and (counts > 0).all()
        assert len(step.kv_len) == len(step.block_tables) == len(counts)
        # Two that share a block may both compute the draft's part of it, which is the same.
        written = dict(zip(step.slot_mapping.tolist(), step.token_ids.tolist(), strict=True))
        assert [written[slot] for slot in step.slot_mapping.tolist()] == step.token_ids.tolist()
        assert (step.token_ids >= 0).all() and (step.token_ids < self.vocab_size).all()
        for request, (first, last) in enumerate(zip(step.cu_q, step.cu_q[1:], strict=False)):
            positions = step.position_ids[first:last]
            end = step.kv_len[request]
            assert positions.tolist() == list(range(end - len(positions), end))
            assert end <= self.max_seq_len
            size = self.tokens_per_block
            slots = step.block_tables[request][positions // size] * size + positions % size
            assert slots.tolist() == step.slot_mapping[first:last].tolist()


class AuditedScheduler(Scheduler):
    """Checks lengths at the moment blocks are published, finished sequences included."""

    def update(self, batch) -> None:
        for item in batch.slices:
            committed = len(item.sequence.tokens)
            assert item.sequence.kv_len <= committed - 1, "an entry of a token that was cut"
            assert max(item.sequence.kv_lens) <= committed - 1, "a draft entry of a cut token"
        super().update(batch)


class Harness:
    """Scheduler, cache and loop without the executor's thread; audits caches after every step."""

    def __init__(
        self,
        target: FakeEngine,
        drafter=None,
        *,
        draft: FakeEngine | None = None,
        num_blocks: int = 200,
        num_host_blocks: int = 0,
        window: AttentionWindow | None = None,
        reuse: bool = True,
        config: SchedulerConfig | None = None,
        by_logits: bool = False,
        draft_lengths=None,
        sampling: SamplingBackend | None = None,
        on_device: bool = False,
        runner=None,
    ) -> None:
        self.target, self.draft = target, draft
        self.drafter = drafter or NoDrafter()
        groups = cache_groups(target, self.drafter)
        self.kv_cache = KvCacheManager(
            num_blocks,
            target.tokens_per_block,
            reuse,
            reuse,
            groups=tuple(groups),
            num_host_blocks=num_host_blocks,
            window=window,
            max_step_tokens=max(target.max_num_tokens, 2 * self.drafter.max_draft_len + 3),
            onboards_aside=target.onboards_aside,
        )
        self.limits = Limits(
            target.max_batch_size,
            target.max_num_tokens,
            target.max_seq_len,
            self.drafter.max_draft_len,
        )
        self.scheduler = AuditedScheduler(
            config or SchedulerConfig(), self.kv_cache, self.limits, draft_lengths
        )
        self.sampler = Sampler(target.vocab_size, sampling or ReferenceSampling())
        target.allocate_kv_cache(num_blocks)
        target.allocate_host_blocks(num_host_blocks)
        self.drafter.prepare(self.kv_cache, self.sampler, by_logits)
        self.runner, self.rounds = runner, None
        if on_device:
            self.runner = FakeRunner(target, draft, self.drafter.max_draft_len)
        mover = BlockMover(self.kv_cache, groups)
        if self.runner is not None:
            self.rounds = Rounds(self.runner, self.scheduler, self.kv_cache, mover.start)
        self.loop = Loop(
            target, self.scheduler, mover, self.drafter, Verifier(self.sampler), self.rounds
        )
        self.num_sequences = 0

    def add(self, request: Request, index: int = 0) -> Sequence:
        self.num_sequences += 1
        prompt = list(request.input_token_ids)
        sequence = Sequence(
            sequence_id=self.num_sequences,
            request_id=self.num_sequences,
            request=request,
            index=index,
            tokens=prompt,
            num_prompt_tokens=len(prompt),
            max_len=min(len(prompt) + request.max_tokens, self.target.max_seq_len),
        )
        self.scheduler.add(sequence)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.cancel(sequence)
        self.drafter.release(sequence)

    def step(self):
        report = self.loop.step()
        self.audit()
        return report

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def run_arriving(self, generator: np.random.Generator, requests, horizon: int) -> None:
        """Run requests that arrive over `horizon` steps, cancelling a few, and compare every
        output with the plain answer; a cancelled one with its beginning."""
        arrivals = sorted(generator.integers(0, horizon, len(requests)).tolist())
        waiting = list(zip(arrivals, requests, strict=True))
        sequences, cancelled, step = [], set(), 0
        while waiting or self.scheduler.has_work:
            while waiting and waiting[0][0] <= step:
                sequences.append(self.add(waiting.pop(0)[1]))
            if sequences and generator.random() < 0.03:
                victim = sequences[generator.integers(len(sequences))]
                if victim.finish_reason is FinishReason.NOT_FINISHED:
                    self.cancel(victim)
                    cancelled.add(victim.sequence_id)
            if self.scheduler.has_work:
                self.step()
            step += 1
        for sequence in sequences:
            tokens, reason = plain_answer(self.target, sequence.request)
            found = sequence.tokens[sequence.num_prompt_tokens :]
            if sequence.sequence_id in cancelled:
                assert found == tokens[: len(found)]
                continue
            assert found == tokens
            assert sequence.finish_reason is reason
            if sequence.request.output_config.return_log_probs:
                assert len(sequence.log_probs) == len(tokens)
        assert self.kv_cache.stats().used_num_blocks == 0

    def audit(self) -> None:
        """Every cache entry that counts as valid holds the committed token of its position."""
        self.kv_cache.check_invariants()
        for sequence in self.scheduler.active:
            assert max(sequence.kv_lens) <= len(sequence.tokens) - 1
            self._audit_cache(self.target, sequence, sequence.kv_len)
            if self.draft is not None:
                self._audit_cache(self.draft, sequence, sequence.kv_lens[DRAFT_GROUP])

    def _audit_cache(self, engine, sequence: Sequence, length: int) -> None:
        """But for blocks that copies will have filled before the next step reads them."""
        pending = {copy.dst_block for copy in self.kv_cache._store.copies}
        pending |= {block for block in sequence.block_table if block in self.kv_cache.arrivals}
        blocks = np.repeat(sequence.block_table, engine.tokens_per_block)[:length]
        is_there = np.isin(blocks, list(pending), invert=True)
        found = engine.read(sequence.block_table, length, is_there)
        committed = np.array(sequence.tokens[:length], np.int64)
        assert (found == np.minimum(committed, engine.vocab_size - 1))[is_there].all()


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
        result = RoundResult(state.committed, tokens[: accepted + 1])
        state.last = [*state.last, *result.tokens][-2:]
        state.committed += accepted + 1
        return result

    def _write(self, engine, table, position, token) -> None:
        block, offset = divmod(position, engine.tokens_per_block)
        if block < len(table):
            engine.cache[table[block] * engine.tokens_per_block + offset] = min(
                token, engine.vocab_size - 1
            )

    def _draw(self, engine, state, table, position) -> int:
        if position >= len(table) * engine.tokens_per_block:
            return 7
        logits = engine.logits(engine.read(table, position + 1))[None, : self.target.vocab_size]
        row = SamplingRow(state.params, state.seed, position + 1)
        return int(sample_rows(logits, [row])[0])


def plain_answer(engine: FakeEngine, request: Request, index: int = 0):
    """(new tokens, finish reason) of one token after another, with no cache and no runtime."""
    params = request.sampling_config
    prompt = list(request.input_token_ids)
    new: list[int] = []
    while True:
        tokens = prompt + new
        banned = [
            word[-1]
            for word in request.bad_words
            if tokens[len(tokens) - len(word) + 1 :] == list(word[:-1])
        ]
        size = params.no_repeat_ngram_size
        if size:
            ngrams = [tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)]
            last = tuple(tokens[len(tokens) - size + 1 :])
            banned += [ngram[-1] for ngram in ngrams if ngram[:-1] == last]
        if request.end_id is not None and len(new) < params.min_tokens:
            banned.append(request.end_id)
        counts = np.bincount(tokens, minlength=engine.vocab_size).astype(np.int32)
        row = SamplingRow(params, params.seed + index, len(tokens), counts, tuple(banned))
        new.append(int(sample_rows(engine.logits(np.array(tokens))[None], [row])[0]))
        if new[-1] == request.end_id:
            return new, FinishReason.END_ID
        if len(new) >= params.min_tokens and any(
            tuple(new[-len(word) :]) == word for word in request.stop_words
        ):
            return new, FinishReason.STOP_WORDS
        if len(new) == request.max_tokens or len(prompt) + len(new) == engine.max_seq_len:
            return new, FinishReason.LENGTH


@pytest.fixture(scope="session")
def fake():
    """The fakes as a namespace: Engine, Harness, Runner, plain_answer."""
    return SimpleNamespace(
        Engine=FakeEngine, Harness=Harness, Runner=FakeRunner, plain_answer=plain_answer
    )
