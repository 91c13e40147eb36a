"""Rounds of lookahead decoding on the host and in slots of a device, side by side."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items

import numpy as np
import torch

from llmctl.builder.engine_format import LookaheadDecodingConfig
from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.device_loop import tree_reference
from llmctl.plugins.device_loop.state import RECORD_EMITTED, RECORD_TOKENS, RoundState
from llmctl.plugins.device_loop.trees import DraftTrees
from llmctl.plugins.ops.lookahead import kernel
from llmctl.plugins.ops.lookahead.arrays import NGRAMS, LookaheadArrays, LookaheadSizes
from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.drafting.lookahead.drafter import Lookahead
from llmctl.runtime.drafting.lookahead.tree import Planned
from llmctl.runtime.drafting.lookahead.upload import pool_rows, write_state, write_texts
from llmctl.runtime.request import Request, Sequence
from support.round_state import make_limits, make_step

Launcher = Callable[[Items[Launch]], object]

VOCAB = 7
JUNK = 123456  # what was not drawn


def next_token(tokens: list[int], seed: int) -> int:
    """Follows from two tokens, and now and then from all of them."""
    if sum(tokens) % 5 == 0:
        return (sum(tokens) // 5 + seed) % VOCAB
    return (3 * tokens[-1] + tokens[-2] + seed) % VOCAB


class Rounds:
    """Requests of up to `config`, on the host and in slots of a device, round after round."""

    def __init__(
        self,
        configs: list[LookaheadDecodingConfig],
        seed: int,
        draft_len: int,
        launch: Launcher,
        device: str = "cpu",
    ) -> None:
        self.draw = np.random.default_rng(seed)
        self.seed, self.draft_len, self.launch = seed, draft_len, launch
        # What is uploaded is on the queue's stream, so all else is, too.
        self.queue = DeviceQueue(device)
        with self.queue.scope():
            self.start(configs, device)

    def start(self, configs: list[LookaheadDecodingConfig], device: str) -> None:
        """Arrays, and a request of each size in them."""
        sizes = LookaheadSizes(*map(max, zip(*(config.sizes for config in configs), strict=True)))
        count, draft_len = len(configs), self.draft_len
        self.state = RoundState.allocate(count, draft_len, device)
        self.trees = DraftTrees.allocate(count, draft_len, device)
        self.arrays = LookaheadArrays.allocate(sizes, count, draft_len, device)
        self.limits = make_limits(count, draft_len)
        self.sequences: list[Sequence] = []
        self.hosts: dict[int, Lookahead] = {}
        # by sequence: what the last round drew, which the next one's drafting takes in
        self.drawn: dict[int, tuple[Planned, list[int]]] = {}
        for index, config in enumerate(configs):
            prompt = self.draw.integers(0, VOCAB, self.draw.integers(2, 20)).tolist()
            end_id = int(self.draw.integers(VOCAB)) if self.draw.random() < 0.5 else None
            request = Request(tuple(prompt), 70, end_id=end_id, lookahead_config=config)
            sequence = Sequence(index, index, request, 0, prompt, len(prompt), 90)
            host = self.hosts[index] = Lookahead(config, sequence)
            host.follow(prompt)
            self.sequences.append(sequence)
            write_state(self.arrays, index, host, end_id, self.queue)
        self.begin()

    def begin(self) -> None:
        """The requests are in another order, and what was drawn in the old one is lost."""
        self.draw.shuffle(self.sequences)
        self.drawn.clear()
        state = self.state
        state.committed.zero_()
        for row, sequence in enumerate(self.sequences):
            tokens = sequence.tokens
            state.previous[row], state.root[row] = tokens[-2], tokens[-1]
            state.committed[row], state.max_len[row] = len(tokens), sequence.max_len
            state.capacity[row] = 96
            pool = self.hosts[sequence.sequence_id].pool
            own = self.hosts[sequence.sequence_id].config.ngram_size - 1
            pool._next = max(pool._next, len(tokens) - own)
        slots = [sequence.sequence_id for sequence in self.sequences]
        configs = [self.hosts[slot].config for slot in slots]
        write_texts(self.arrays, self.sequences, configs, slots, self.queue)

    def draft(self, draft_len: int) -> list[Planned]:
        """Both sides, compared."""
        batch = len(self.sequences)
        self.launch([kernel.look_ahead(self.state, self.trees, self.arrays, batch, draft_len)])
        plans = []
        for row, sequence in enumerate(self.sequences):
            host, tokens = self.hosts[sequence.sequence_id], sequence.tokens
            if sequence.sequence_id in self.drawn:
                before, drawn = self.drawn[sequence.sequence_id]
                host.learn(tokens, before.ends, drawn)
            most = min(draft_len, host.config.max_draft_len)
            plan = host.propose(tokens, max(0, min(most, sequence.max_len - len(tokens) - 1)))
            count = int(self.trees.counts[row])
            found = self.state.drafts[row, :count].tolist()
            parents = self.trees.parents[row, :count].tolist()
            assert found == plan.drafts.tokens
            assert [node - 1 for node in parents] == (
                plan.drafts.parents or list(range(ROOT, count - 1))
            )
            slot, width = sequence.sequence_id, host.window.width
            ends = self.arrays.ends[slot, :width].tolist()
            assert ends == [-1 if end is None else end - ROOT for end in plan.ends]
            cells = (
                self.arrays.windows[slot, : width * len(host.window.levels)].cpu().view(-1, width)
            )
            wanted = torch.tensor(host.window.levels)
            cells[0, 0] = wanted[0, 0] = 0  # the root's place
            assert torch.equal(cells, wanted.int())
            self.check_pool(slot, host)
            plans.append(plan)
        return plans

    def check_pool(self, slot: int, host: Lookahead) -> None:
        wanted = pool_rows(host.pool, self.arrays.sizes.row_width)
        found = self.arrays.pools[slot].cpu().numpy().copy()
        for row, (_, ngrams) in host.pool.rows.items():
            found[row, NGRAMS + sum(map(len, ngrams)) :] = 0
        assert np.array_equal(found, wanted)

    def verify(self, plans: list[Planned], draft_len: int) -> int:
        """The target's step and acceptance; how many drafts were accepted."""
        batch = len(self.sequences)
        self.state.targets.fill_(JUNK)
        self.drawn.clear()
        for row, (sequence, plan) in enumerate(zip(self.sequences, plans, strict=True)):
            own = [
                next_token([*sequence.tokens, *plan.drafts.tokens_to(node)], self.seed)
                for node in range(ROOT, len(plan.drafts.tokens))
            ]
            if draft_len:
                self.drawn[sequence.sequence_id] = plan, own
            first = row * (draft_len + 1)
            self.state.targets[first : first + len(own)] = torch.tensor(own, dtype=torch.int32)
        record = self.state.ring[int(self.state.counter) % len(self.state.ring)]
        step = make_step(self.limits)
        tree_reference.accept_tree(self.state, self.trees, step, self.limits, batch, draft_len)
        accepted = 0
        for row, sequence in enumerate(self.sequences):
            count = int(record[row, RECORD_EMITTED])
            sequence.tokens += record[row, RECORD_TOKENS : RECORD_TOKENS + count].tolist()
            accepted += count - 1
        return accepted

    def play(self, num_rounds: int) -> tuple[int, int]:
        """(rounds, accepted drafts): whole trees, smaller ones and none, and rows change places
        now and then."""
        done = accepted = 0
        with self.queue.scope():
            while not self.is_over and done < num_rounds:
                accepted += self.play_round()
                done += 1
        return done, accepted

    def play_round(self) -> int:
        """How many drafts were accepted."""
        most, accepted = self.draft_len, 0
        length = most if self.draw.random() < 0.8 else int(self.draw.integers(0, most + 1))
        if length:
            accepted = self.verify(self.draft(length), length)
        else:
            self.go_on_without_drafts()
        if self.draw.random() < 0.15:
            self.begin()
        return accepted

    def go_on_without_drafts(self) -> None:
        """A round of the roots alone."""
        self.verify([Planned(Drafts(), []) for _ in self.sequences], 0)
        for sequence in self.sequences:  # the device sees the last two tokens of what it missed
            host = self.hosts[sequence.sequence_id]
            own = host.config.ngram_size - 1
            host.pool._next = max(host.pool._next, len(sequence.tokens) - min(2, own))

    @property
    def is_over(self) -> bool:
        return any(len(sequence.tokens) + 1 >= sequence.max_len for sequence in self.sequences)
