"""A model small enough to recompute by hand, behind the interface of an engine."""

from __future__ import annotations

import numpy as np

from llmctl.plugins.ops.paged_attention.fp8_context import context_end
from llmctl.plugins.ops.sampling.reference import sample_rows
from llmctl.plugins.ops.sampling.spec import SamplingRow
from llmctl.runtime.kv_cache import CopyKind
from llmctl.runtime.request import FinishReason, Request
from support.mixing import blend, mix_one

FP8 = 1 << 32  # what a token that was computed with FP8 products has in the cache beside its id


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


def root_of(step, request: int) -> int:
    """The position of a request's root, in this step or stored by an earlier one."""
    stored = step.trees.roots
    return int(step.position_ids[step.cu_q[request]] if stored is None else stored[request])


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
        context_group: int = 0,
    ) -> None:
        self.is_asynchronous = is_asynchronous
        self.common_vocab = vocab_size
        self.vocab_size = vocab_size + extra_vocab
        self.max_seq_len = max_seq_len
        self.max_batch_size = max_batch_size
        self.max_num_tokens = max_num_tokens
        self.max_draft_len = max_draft_len
        self.takes_trees = True
        self.shares_logits = False
        self.context_group = context_group
        self.tokens_per_block = tokens_per_block
        self.agreement = agreement
        self.whole_context = whole_context
        self.num_runs = 0
        self.num_tokens: list[int] = []
        self.num_copies = 0
        self.num_fp8 = 0  # tokens that were computed with FP8 products
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
        everything, row = blend(tokens.tobytes(), self.common_vocab, self.whole_context)
        if (mix_one(everything ^ 0x5A5A) >> 11) / 2.0**53 >= self.agreement:
            row = np.roll(row, 1)
        padding = np.full(self.vocab_size - self.common_vocab, 99.0)
        return np.concatenate([row, padding]).astype(np.float32)

    def run(self, step) -> np.ndarray:
        self.num_runs += 1
        self.num_tokens.append(len(step.token_ids))
        if self.num_runs == self.fail_at:
            raise RuntimeError("the engine broke")
        self._check(step)
        stored = step.slot_mapping >= 0
        self.cache[step.slot_mapping[stored]] = (step.token_ids + self._products(step))[stored]
        rows = np.empty((len(step.logit_rows), self.vocab_size), np.float32)
        for index, row in enumerate(step.logit_rows):
            request = int(np.searchsorted(step.cu_q, row, side="right")) - 1
            length = int(step.position_ids[row]) + 1
            places: int | np.ndarray = length
            if step.trees is not None and step.trees.start[request] >= 0:
                places = np.arange(length)
                root = root_of(step, request)
                path = step.trees.paths[step.trees.start[request] + row - step.cu_q[request]]
                places[root:] = root + path[: length - root]
            rows[index] = self.logits(self.read(step.block_tables[request], places))
        return rows

    def _products(self, step) -> np.ndarray:
        """Of each token of a step, FP8 or 0; a kernel for prompts has groups of them or none."""
        if step.context_end is None:
            return np.zeros(len(step.token_ids), np.int64)
        counts = np.diff(step.cu_q)
        found = step.position_ids < np.repeat(step.context_end, counts)
        for first, last in zip(step.cu_q, step.cu_q[1:], strict=False):
            if found[first:last].any():
                assert self.context_group and last - first >= self.context_group
                self.num_fp8 += int(found[first:last].sum())
        return found * np.int64(FP8)

    def compact(self, moves) -> None:
        for own in moves:
            for source, target in own:
                self.cache[target] = self.cache[source]

    def read(self, table, places: int | np.ndarray, is_there=None) -> np.ndarray:
        """The first so many cached tokens of a block table, or those at some places, which are all
        there, or those of a mask."""
        positions = np.arange(places) if isinstance(places, int) else places
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
            if name in ("trees", "best_only") or array is None:
                continue
            assert array.dtype == np.int32 and array.flags.c_contiguous, name
        counts = np.diff(step.cu_q)
        assert len(step.token_ids) == step.cu_q[-1] <= self.max_num_tokens
        assert 0 < len(counts) <= self.max_batch_size and (counts > 0).all()
        assert len(step.kv_len) == len(step.block_tables) == len(counts)
        # Two that share a block may both compute the draft's part of it, which is the same.
        stored = step.slot_mapping >= 0
        slots, tokens = step.slot_mapping[stored].tolist(), step.token_ids[stored].tolist()
        written = dict(zip(slots, tokens, strict=True))
        assert [written[slot] for slot in slots] == tokens
        assert (step.token_ids >= 0).all() and (step.token_ids < self.vocab_size).all()
        for request, (first, last) in enumerate(zip(step.cu_q, step.cu_q[1:], strict=False)):
            positions = step.position_ids[first:last]
            end = step.kv_len[request]
            places = np.arange(end - len(positions), end)
            if step.trees is None or step.trees.start[request] < 0:
                assert positions.tolist() == places.tolist()
            elif step.trees.roots is None:
                assert self.takes_trees and positions[0] == places[0]
            else:
                rows = step.trees.paths[step.trees.start[request] :][: len(positions)]
                root = root_of(step, request)
                places = root + rows[np.arange(len(rows)), positions - root]
                assert places.max() < end and (positions > root).all()
            assert end <= self.max_seq_len
            size = self.tokens_per_block
            slots = step.block_tables[request][places // size] * size + places % size
            found = step.slot_mapping[first:last]
            if step.trees is None:
                assert (found >= 0).all()
            assert slots[found >= 0].tolist() == found[found >= 0].tolist()


def as_computed(tokens, end: int) -> np.ndarray:
    """Tokens as the cache has them, those before `end` computed with FP8 products."""
    marked = np.array(tokens, np.int64)
    marked[:end] += FP8
    return marked


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
        if len(new) < params.min_tokens:
            banned += request.end_ids
        counts = np.bincount(tokens, minlength=engine.vocab_size).astype(np.int32)
        row = SamplingRow(params, params.seed + index, len(tokens), counts, tuple(banned))
        context = as_computed(tokens, context_end(len(prompt), engine.context_group))
        new.append(int(sample_rows(engine.logits(context)[None], [row])[0]))
        if new[-1] in request.end_ids:
            return new, FinishReason.END_ID
        if len(new) >= params.min_tokens and any(
            tuple(new[-len(word) :]) == word for word in request.stop_words
        ):
            return new, FinishReason.STOP_WORDS
        if len(new) == request.max_tokens or len(prompt) + len(new) == engine.max_seq_len:
            return new, FinishReason.LENGTH
