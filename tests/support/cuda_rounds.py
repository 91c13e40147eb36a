"""Engines and a device made of fakes, for rounds."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from llmctl.plugins.backends.cuda.interpret import run_launches
from llmctl.plugins.backends.cuda.kernel_spec import StepLimits
from llmctl.plugins.backends.cuda.queue import DeviceQueue
from llmctl.plugins.ops.sampling.reference import ReferenceSampling, argmax_rows
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.plain.device import NoDeviceDrafter
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from support.cuda import FakeCapture, FakeGraph, launch_sampling, stale_step

DRAFT_LEN = 3
MOST_STORED = 4  # rows of which logits are stored where the best ids alone are wanted


class Program:
    """A fake engine behind the interface of a program; `fail` is raised by the next launch."""

    def __init__(self, engine) -> None:
        self.engine = engine
        self.limits = StepLimits(
            max_num_tokens=engine.max_num_tokens,
            max_num_rows=engine.max_num_rows,
            max_batch_size=engine.max_batch_size,
            max_seq_len=engine.max_seq_len,
            max_draft_len=engine.max_draft_len,
            tokens_per_block=engine.tokens_per_block,
            kv_dtype="bfloat16",
        )

        self.step = stale_step(self.limits)
        self.num_launches = 0
        self.fail: Exception | None = None

    def enqueue(self, shape, stream: int) -> None:
        """Every row's logits follow from the tokens cached before it, as far as blocks go."""
        self.num_launches += 1
        step, engine = self.step, self.engine
        cu_q = step.cu_q[: shape.num_requests + 1].numpy()
        slots = step.slot_mapping[: cu_q[-1]].numpy()
        tokens = np.minimum(step.token_ids[: cu_q[-1]].numpy(), engine.vocab_size - 1)
        engine.cache[slots[slots >= 0]] = tokens[slots >= 0]
        for index, row in enumerate(step.logit_rows[: shape.num_rows].tolist()):
            engine.logits[index] = 0.0
            if row >= cu_q[-1] or slots[row] < 0:
                self.skip_row()
                continue
            request = int(np.searchsorted(cu_q, row, side="right")) - 1
            table = step.block_tables[request].numpy()
            length = int(step.position_ids[row]) + 1
            places: int | np.ndarray = length
            if shape.max_tree_len and step.tree_start[request] >= 0:
                root, first = int(step.tree_root[request]), int(step.tree_start[request])
                path = step.paths[first + row - cu_q[request]].numpy()
                places = np.arange(length)
                places[root:] = root + path[: length - root]
            found = engine.logits_after(engine.read(table, places))
            engine.logits[index] = torch.from_numpy(found)
        if shape.best_only:
            assert self.keeps_best(shape.num_rows)
            logits = engine.logits[: shape.num_rows]
            self.best = torch.from_numpy(argmax_rows(logits.numpy())).int()
            logits.fill_(torch.nan)  # there are none

    def keeps_best(self, rows: int) -> bool:
        return rows > MOST_STORED

    def best_ids(self, out: torch.Tensor, rows: int, *, stride: int = 1, offset: int = 0):
        """A function instead of a launch."""

        def store() -> None:
            out.view(-1)[offset : offset + rows * stride : stride] = self.best
            del self.best

        assert self.keeps_best(rows)
        return store

    def skip_row(self) -> None:
        """Of padding, or of a token that the cache has no place for."""

    def launch(self, launches, stream: int) -> None:
        if self.fail is not None:
            raise self.fail
        self.num_launches += len(launches)
        for launch in launches:
            if callable(launch):
                launch()
            elif launch.spec.name.startswith(("lookahead.", "growth.")):
                run_launches([launch])
            else:
                launch_sampling(launch)


class OnDevice:
    """Before a fake engine among the bases: what a runner asks of a CudaEngine."""

    merges_draws = False

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.logits_after = super().logits
        self.queue = DeviceQueue("cpu")
        self.max_num_rows = self.max_batch_size * (self.max_draft_len + 1)
        self.logits = torch.zeros(self.max_num_rows, self.vocab_size)
        self.program = Program(self)
        self.is_capturable = lambda: True

    def run(self, step) -> np.ndarray:
        logits, self.logits = self.logits, self.logits_after
        try:
            return super().run(step)
        finally:
            self.logits = logits

    def enqueue_moves(self, starts: torch.Tensor, moves: torch.Tensor) -> None:
        def run() -> None:
            for source, target in moves[: int(starts[-1])].tolist():
                self.cache[target] = self.cache[source]

        self.program.launch([run], 0)

    def prepare_prompts(self, max_num_tokens: int) -> None:
        pass


class Capture(FakeCapture):
    """Counts launches of each graph; keeps none alive."""

    def __init__(self, programs) -> None:
        super().__init__()
        self.programs = programs
        self.num_captured = 0
        self.alive: weakref.WeakSet[FakeGraph] = weakref.WeakSet()
        self.launches: weakref.WeakKeyDictionary[FakeGraph, int] = weakref.WeakKeyDictionary()
        self.drafting: weakref.WeakSet[FakeGraph] = weakref.WeakSet()  # those of the last program

    def __call__(self, record) -> FakeGraph:
        before = [program.num_launches for program in self.programs]
        graph = Hashed(record)
        self.num_captured += 1
        self.alive.add(graph)
        saved = [program.launch for program in self.programs]
        for program in self.programs:  # nothing is executed while capturing
            program.launch = _count(program)
            program.enqueue = _count_one(program)
        record()
        for program, launch in zip(self.programs, saved, strict=True):
            del program.enqueue
            program.launch = launch
        added = [p.num_launches - count for p, count in zip(self.programs, before, strict=True)]
        self.launches[graph] = sum(added)
        if len(added) > 1 and added[1]:
            self.drafting.add(graph)
        return graph

    def launches_alive(self, is_draft: bool) -> list[int]:
        """Of each graph of drafting, or of verification."""
        return [
            count for graph, count in self.launches.items() if (graph in self.drafting) == is_draft
        ]


class Hashed(FakeGraph):
    """A graph that weak collections can hold."""

    __hash__ = object.__hash__


def _count(program: Program):
    def launch(launches, stream: int) -> None:
        program.num_launches += len(launches)

    return launch


def _count_one(program: Program):
    def enqueue(shape, stream: int) -> None:
        program.num_launches += 1

    return enqueue


class Device:
    """Target, draft, drafter and the runner, on one queue."""

    def __init__(self, make_engine, with_draft: bool = True, lengths=(), **draft) -> None:
        self.queue = DeviceQueue("cpu")
        self.target = make_engine(self.queue)
        self.draft = make_engine(self.queue, agreement=0.8, **draft) if with_draft else None
        self.drafter = DraftEngineDrafter(self.draft, DRAFT_LEN) if self.draft else None
        engines = [self.target] + ([self.draft] if self.draft else [])
        self.capture = Capture([engine.program for engine in engines])
        drafts = DeviceDraftEngine(self.draft, DRAFT_LEN) if self.draft else NoDeviceDrafter()
        self.runner = CudaRoundRunner(self.target, drafts, self.capture, lengths=lengths)

    @contextmanager
    def executor(self) -> Iterator[Executor]:
        config = ExecutorConfig(KvCacheConfig(num_blocks=200), check_invariants=True)
        sampling = ReferenceSampling()
        with Executor(self.target, self.drafter, config, sampling, self.runner) as executor:
            yield executor


def make_request(index: int = 0, max_tokens: int = 12, **rest) -> Request:
    prompt = tuple((7 * index + i * i) % 23 for i in range(3 + index))
    params = [
        SamplingConfig(),
        SamplingConfig(temperature=0.9, top_k=0, seed=2**63 + index),
        SamplingConfig(temperature=1.3, top_k=9, top_p=0.9, min_p=0.01, seed=index),
    ][index % 3]
    return Request(prompt, max_tokens, params, **rest)


class Lengths:
    """0 to 3 drafts for everybody, decided anew before every round, or those of `choices`."""

    beside_prompts = True

    def __init__(self, choices=range(DRAFT_LEN + 1), seed: int = 1) -> None:
        self.common: int | None = 0
        self.choices = tuple(choices)
        self.chance = random.Random(seed)

    def plan(self, generation) -> None:
        self.common = self.chance.choice(self.choices)

    def of(self, sequence) -> int:
        return self.common
