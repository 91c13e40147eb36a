"""An EAGLE head beside a fake engine: its cache holds the tokens that led to each pair."""

from __future__ import annotations

import numpy as np

from llmctl.runtime.drafting.eagle.pairs import pack_pairs, roots
from llmctl.runtime.drafting.growth.levels import pack_level
from support.fake_engine import FakeEngine
from support.mixing import fold, share


class FeaturedEngine(FakeEngine):
    """Also keeps which tokens each row of its last step was computed from, of all its tokens."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.features: list[tuple[int, ...]] = []

    def run(self, step):
        logits = super().run(step)
        self.features = []
        for row in range(len(step.token_ids)):
            request = int(np.searchsorted(step.cu_q, row, side="right")) - 1
            length = int(step.position_ids[row]) + 1
            places: int | np.ndarray = length
            if step.trees is not None and step.trees.start[request] >= 0:
                places = np.arange(length)
                root = step.position_ids[step.cu_q[request]]
                path = step.trees.paths[step.trees.start[request] + row - step.cu_q[request]]
                places[root:] = root + path[: length - root]
            self.features.append(tuple(self.read(step.block_tables[request], places).tolist()))
        return logits


class FakeEagleHead:
    """Knows what greedy decoding says of a text; for a share of the contexts, something else."""

    def __init__(self, engine: FeaturedEngine, agreement: float = 1.0, most_rows: int = 1) -> None:
        self.engine, self.agreement = engine, agreement
        self.most_of_one = most_rows  # of a sequence in a step
        self.most_sequences = engine.max_batch_size
        self.most_rows = engine.max_batch_size * most_rows
        self.contexts: list[tuple[int, ...]] = []
        self.cache: dict[int, tuple[int, ...]] = {}  # by slot: the tokens up to the pair's own
        self.steps: list[tuple[str, int]] = []  # of the head: which, and of how many tokens
        self.num_foreign = 0  # entries whose own token is another sequence's

    @property
    def holders(self):
        return {"eagle": self}

    def copy_blocks(self, copies):
        size = self.engine.tokens_per_block
        for copy in copies:
            for offset in range(size):
                content = self.cache.get(copy.src_block * size + offset)
                if content is not None:
                    self.cache[copy.dst_block * size + offset] = content

    def extend(self, pairs):
        step = pack_pairs(pairs, self.engine.tokens_per_block)
        assert len(pairs) <= self.engine.max_batch_size
        assert len(step.token_ids) <= self.engine.max_num_tokens
        self.steps.append(("extend", len(step.token_ids)))
        rows = np.concatenate([own.rows for own in pairs])
        assert len(rows) == len(step.token_ids)
        made = [
            (*self.engine.features[row], token)
            for row, token in zip(rows.tolist(), step.token_ids.tolist(), strict=True)
        ]
        for own, first in zip(pairs, step.cu_q, strict=False):
            tokens = tuple(own.sequence.tokens)
            for position in range(own.start, own.end):
                assert made[first + position - own.start] == tokens[: position + 2]
        self._write(step, made)
        self.contexts = [made[row] for row in step.logit_rows]

    def next(self, rows, growths, tables):
        size = self.engine.tokens_per_block
        step = pack_level(growths, roots(growths), tables, size)
        before = [self.contexts[row] for row in rows]
        tokens = step.token_ids.tolist()
        made = [(*own, token) for own, token in zip(before, tokens, strict=True)]
        assert step.position_ids.tolist() == [len(own) - 2 for own in made]
        assert len(step.kv_len) <= self.engine.max_batch_size
        assert np.diff(step.cu_q).max() <= self.most_of_one
        self.steps.append(("next", len(tokens)))
        for slot, own in zip(step.slot_mapping.tolist(), made, strict=True):
            self.cache[slot] = own
        assert len(set(step.slot_mapping.tolist())) == len(made)
        for row, own in enumerate(made):
            request = int(np.searchsorted(step.cu_q, row, side="right")) - 1
            places = list(range(len(own) - 1))
            if step.trees is not None:
                root = int(step.trees.roots[request])
                path = step.trees.paths[step.trees.start[request] + row - step.cu_q[request]]
                places[root:] = (root + path[: len(own) - 1 - root]).tolist()
            else:
                assert step.kv_len[request] == len(own) - 1
            assert max(places) < step.kv_len[request]
            self._check_cache(step.block_tables[request], own, places)
        self.contexts = made

    def logits(self, rows):
        found = []
        for context in (self.contexts[row] for row in rows):
            tokens = np.array(context)
            own = self.engine.logits(tokens)
            if share(fold(tokens) ^ 1, 1)[0] >= self.agreement:
                own = np.roll(own, 1)
            found.append(own)
        return np.array(found, np.float32)

    def _write(self, step, made):
        for slot, own in zip(step.slot_mapping.tolist(), made, strict=True):
            self.cache[slot] = own
        for request, last in enumerate(step.cu_q[1:]):
            self._check_cache(step.block_tables[request], made[last - 1])

    def _check_cache(self, table, context, places=None):
        """Every pair up to the context's last is there, at `places`. The last before a seam between
        sequences may have another token."""
        size = self.engine.tokens_per_block
        for position in range(len(context) - 1):
            place = position if places is None else places[position]
            found = self.cache[int(table[place // size] * size + place % size)]
            assert found[:-1] == context[: position + 1]
            self.num_foreign += found != context[: position + 2]
