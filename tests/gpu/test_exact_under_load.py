"""Whatever runs beside a request, with whatever draft: its answer is the one it gets alone.

Random traffic through the executor, which runs rounds on the device ahead of the host wherever it
can, and steps led by the host in between.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.e2e import DRAFT_LEN, llmctl
from support.gpu import quantize
from support.load import Outcome, differences, random_requests, run_alone, run_under_load

from llmctl.builder.engine_format import read_engine_config
from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.ngram.drafter import NgramDrafter
from llmctl.runtime.drafting.plain.device import NoDeviceDrafter
from llmctl.runtime.engines.open_cuda import LoadedEngines, plan_engines
from llmctl.runtime.request import Request
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner
from llmctl.runtime.schedule.scheduler import CapacitySchedulerPolicy, SchedulerConfig
from llmctl.runtime.stats.counters import IterationStats
from scripts.models.make_planted_checkpoints import Recipe, write_checkpoint

PAIRS = ("demo-bfloat16", "demo-fp8", "planted-fp8")
NUM_REQUESTS = 150
MAX_NUM_TOKENS = 128  # so that prompts are read in up to four chunks
NUM_BLOCKS = 512
FEW_BLOCKS = 26  # of 32 tokens: one and a half of the longest sequences
LIMITS = ("--max-batch-size", 16, "--max-seq-len", 1024)


class CountingRunner(CudaRoundRunner):
    """Counts rounds, and those that were enqueued while another was still unread."""

    num_rounds = num_ahead = num_waiting = 0

    def enqueue(self, block_tables, draft_len: int) -> None:
        super().enqueue(block_tables, draft_len)
        self.num_rounds += 1
        self.num_ahead += self.num_waiting > 0
        self.num_waiting += 1

    def collect(self):
        self.num_waiting -= 1
        return super().collect()

    def abandon(self) -> None:
        self.num_waiting = 0
        super().abandon()


@dataclass
class Pair:
    """A loaded pair, its traffic, and the answers that requests get alone."""

    opened: LoadedEngines
    requests: list[Request]
    alone: list[Outcome]

    def run(
        self, draft: str | None, config: ExecutorConfig, seed: int
    ) -> tuple[list[Outcome], list[IterationStats], CountingRunner | None]:
        """Outcomes under load; draft: None, "engine" or "ngram"."""
        opened, drafter, runner = self.opened, None, None
        if draft == "ngram":
            drafter = NgramDrafter(DRAFT_LEN, 3)
        elif draft == "engine":
            draft_engine = opened.engines["draft"]
            drafter = DraftEngineDrafter(draft_engine, DRAFT_LEN)
            runner = CountingRunner(opened.target, DeviceDraftEngine(draft_engine, DRAFT_LEN))
        else:
            runner = CountingRunner(opened.target, NoDeviceDrafter())
        with Executor(opened.target, drafter, config, opened.sampling, runner) as executor:
            generator = np.random.default_rng(seed)
            outcomes = run_under_load(executor, self.requests, generator)
            stats = executor.get_latest_iteration_stats()
        kv_cache = executor._worker.kv_cache
        kv_cache.check_invariants()
        assert kv_cache.stats().used_num_blocks == 0, "blocks that nobody gave back"
        return outcomes, stats, runner


def make_config(num_blocks: int = NUM_BLOCKS, **rest) -> ExecutorConfig:
    """check_invariants: whenever nothing runs, every block must be accounted for."""
    return ExecutorConfig(
        KvCacheConfig(num_blocks), check_invariants=True, iter_stats_max_iterations=100_000, **rest
    )


def build(folder: Path, name: str, role: str, examples: Path) -> None:
    kind, dtype = name.split("-")
    options: list[object] = [*LIMITS]
    if kind == "planted":
        checkpoint = folder / f"{name}-{role}-checkpoint"
        write_checkpoint(
            checkpoint, Recipe("tiny", role, 0.8), tokenizer_dir=examples / "demo-target"
        )
    elif dtype == "fp8":
        checkpoint = quantize(examples / f"demo-{role}", folder / f"{name}-{role}-checkpoint")
    else:
        checkpoint = examples / f"demo-{role}"
        options += ["--dtype", dtype]
    if role == "target":
        options += ["--max-draft-len", DRAFT_LEN, "--max-num-tokens", MAX_NUM_TOKENS]
    llmctl("build", "--backend", "cuda", "--checkpoint-dir", checkpoint,
           "--output-dir", folder / f"{name}-{role}", *options)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    """All engines, built at the same time."""
    path = tmp_path_factory.mktemp("engines")
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(build, path, name, role, repository / "examples")
            for name in PAIRS
            for role in ("target", "draft")
        ]
        for job in jobs:
            job.result()
    return path


@pytest.fixture(scope="module")
def prompt(repository: Path) -> Callable[[int, int], tuple[int, ...]]:
    """prompt(start, length): ids of the held-out text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(repository / "examples/demo-target/tokenizer.json"))
    text = (repository / "examples/heldout.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return lambda start, length: tuple(ids[start : start + length])


@pytest.fixture(scope="module", params=PAIRS)
def pair(request: pytest.FixtureRequest, folder: Path, prompt) -> Pair:
    name = request.param
    target = folder / f"{name}-target"
    opened = plan_engines(
        {"target": target, "draft": folder / f"{name}-draft"}, max_tokens=32 * NUM_BLOCKS
    ).load()
    vocab = int(read_engine_config(target).pretrained_config["vocab_size"])
    generator = np.random.default_rng(PAIRS.index(name))
    requests = random_requests(generator, prompt, vocab, NUM_REQUESTS)
    config = ExecutorConfig(KvCacheConfig(NUM_BLOCKS, enable_block_reuse=False))
    runner = CudaRoundRunner(opened.target, NoDeviceDrafter())
    with Executor(opened.target, None, config, opened.sampling, runner) as executor:
        alone = run_alone(executor, requests)
    return Pair(opened, requests, alone)


@pytest.mark.parametrize("draft", [None, "engine", "ngram"])
def test_answers_under_load_are_those_that_requests_get_alone(
    pair: Pair, draft: str | None
) -> None:
    found, stats, runner = pair.run(draft, make_config(), seed=1)
    assert differences(pair.requests, found, pair.alone) == []
    assert stats[-1].kv_cache_stats.reused_blocks > 0
    batches = [item.inflight_batching_stats for item in stats]
    mixed = [b for b in batches if b.num_context_requests and b.num_gen_requests]
    assert len(mixed) > 10, "no steps of prompts and generation together"
    if runner is not None:
        assert runner.num_rounds > 20 and runner.num_ahead > 10, "the host was never behind"


def test_paused_requests_resume_where_they_were(pair: Pair) -> None:
    policy = SchedulerConfig(CapacitySchedulerPolicy.MAX_UTILIZATION)
    found, stats, runner = pair.run("engine", make_config(FEW_BLOCKS, scheduler=policy), seed=2)
    assert differences(pair.requests, found, pair.alone) == []
    assert sum(item.inflight_batching_stats.num_paused_requests > 0 for item in stats) > 3
    assert runner is not None and runner.num_rounds > 20
