"""Times the host's work around the engines: one sequence, engines that compute nothing.

    python -m scripts.bench.rounds [--vocab 4096] [--backend numpy] [--rounds 300]

Prints a Markdown table of microseconds per round (schedule, pack, sample, accept, commit) without
a draft and with drafts of 4 tokens, for the compiled sampling or the numpy reference. The engines
return the same logits for every token, so drafts under accept-by-tokens are all accepted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Items
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from llmctl.plugins.backends.cpu import CpuSampling
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.ops.sampling.reference import ReferenceSampling
from llmctl.plugins.ops.sampling.spec import SamplingBackend
from llmctl.runtime.drafting.cache_groups import cache_groups
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafter import Drafter
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.generate.sampler import Sampler
from llmctl.runtime.generate.verify import Verifier
from llmctl.runtime.kv_cache import BlockCopy, KvCacheManager
from llmctl.runtime.kv_cache.block_mover import BlockMover
from llmctl.runtime.loop import Loop
from llmctl.runtime.request import Request, SamplingConfig, Sequence
from llmctl.runtime.schedule.scheduler import Limits, Scheduler, SchedulerConfig

DRAFT_LEN, NUM_BLOCKS, MAX_LEN = 4, 300, 8192
BACKENDS: dict[str, type[SamplingBackend]] = {"cpu": CpuSampling, "numpy": ReferenceSampling}
GREEDY = SamplingConfig()
TEMPERATURE = SamplingConfig(temperature=0.8, top_k=0)
FILTERED = SamplingConfig(temperature=0.8, top_k=50, top_p=0.9)


class IdleEngine:
    """Logits without a model."""

    max_seq_len, max_batch_size, max_num_tokens = MAX_LEN, 8, 64
    max_draft_len, tokens_per_block = DRAFT_LEN, 32
    onboards_aside = False
    takes_trees, context_group, shares_logits = False, 0, False
    is_asynchronous = False

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        row = np.random.default_rng(0).standard_normal((1, vocab_size)) * 3
        self._logits = row.astype(np.float32).repeat(DRAFT_LEN + 1, axis=0)

    def allocate_kv_cache(self, num_blocks: int) -> None:
        """There is none."""

    def allocate_host_blocks(self, num_blocks: int) -> None:
        """There are none."""

    def copy_blocks(self, copies: Items[BlockCopy]) -> None:
        """Nothing to copy."""

    def run(self, step: StepInputs) -> NDArray[np.float32]:
        """The same logits again."""
        return self._logits[: len(step.logit_rows)]


def round_s(
    params: SamplingConfig, vocab: int, backend: SamplingBackend, rounds: int, rule: str
) -> float:
    """The median seconds of a round of generation."""
    engine = IdleEngine(vocab)
    drafter: Drafter = NoDrafter()
    if rule != "no draft":
        drafter = DraftEngineDrafter(IdleEngine(vocab), DRAFT_LEN)
    groups = cache_groups(engine, drafter)
    kv_cache = KvCacheManager(NUM_BLOCKS, 32, groups=tuple(groups))
    limits = Limits(8, 64, MAX_LEN, drafter.max_draft_len)
    scheduler = Scheduler(SchedulerConfig(), kv_cache, limits)
    sampler = Sampler(vocab, backend)
    drafter.prepare(kv_cache, sampler, rule == "by logits")
    mover = BlockMover(kv_cache, groups)
    loop = Loop(engine, scheduler, mover, drafter, Verifier(sampler))
    request = Request((1, 2, 3), MAX_LEN - 3, params)
    scheduler.add(Sequence(1, 1, request, 0, [1, 2, 3], 3, MAX_LEN))
    times = []
    for _ in range(rounds + 20):  # the first rounds warm up
        began = perf_counter()
        loop.step()
        times.append(perf_counter() - began)
    return float(np.median(times[20:]))


def main() -> None:
    """Parse options, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--vocab", type=int, nargs="+", default=[4096, 128256])
    parser.add_argument("--backend", choices=sorted(BACKENDS), nargs="+", default=sorted(BACKENDS))
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    print(f"| vocab | drafts | sampling | {' | '.join(f'{b} µs' for b in options.backend)} |")
    print("|---|---|---|" + "---|" * len(options.backend))
    named = {"greedy": GREEDY, "temperature": TEMPERATURE, "top-k + top-p": FILTERED}
    for vocab in options.vocab:
        for rule in ("no draft", "by tokens", "by logits"):
            for name, params in named.items():
                times = [
                    round_s(params, vocab, BACKENDS[backend](), options.rounds, rule) * 1e6
                    for backend in options.backend
                ]
                cells = " | ".join(f"{time:.0f}" for time in times)
                print(f"| {vocab} | {rule} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
