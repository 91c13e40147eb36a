"""Random traffic for some time, every text checked: for engines of several ranks, and of one.

    python -m scripts.bench.soak ENGINE [--draft-engine DRAFT | --ngram] [--alone ENGINE]
        [--seconds 600] [--seed 0] [--requests 48] [--max-tokens N] [--ranks-on-one-device]

Requests are greedy, seeded, filtered and penalized, with and without drafts, with prompts that
share beginnings and take several chunks; some are cancelled. Each must answer what it answers
alone and without drafts: with --alone of another engine, such as one of one rank where both were
built with --tp-invariant. Greedy texts of planted weights must also be the planted ones. Memory of
all processes and GPUs may not grow after half of the time, and no process, child or file in
/dev/shm may stay behind.

Prints what happened; exit code 1 where something is wrong.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from llmctl.builder.engine_format import EngineConfig, read_engine_config
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.engines.planted_text import planted_text
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request
from scripts.bench.soak_traffic import MOST_NEW, Texts, Totals, make_requests, run_alone, run_for

MOST_GROWTH = 64 << 20  # bytes of RAM of all processes: allocators keep some
MOST_DEVICE_GROWTH = 256 << 20  # of a GPU: graphs of rounds that come up late
NGRAM, PARTS = 3, 4
_SHM = Path("/dev/shm")


def children() -> list[int]:
    """Of this process, whichever thread started them."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def resident_bytes() -> int:
    """Of this process and its children."""
    pages = (
        Path(f"/proc/{pid}/statm").read_text().split()[1] for pid in (os.getpid(), *children())
    )
    return sum(map(int, pages)) * os.sysconf("SC_PAGE_SIZE")


def device_bytes(num_gpus: int) -> list[int]:
    """Taken of each GPU, by anybody."""
    import torch

    taken = (torch.cuda.mem_get_info(index) for index in range(num_gpus))
    return [total - free for free, total in taken]


@contextmanager
def opened(options: EngineOptions) -> Iterator[tuple[Executor, EngineConfig, int]]:
    """(a running executor, its target, the GPUs that it uses)."""
    checked = check_engines(options)
    engines = OpenEngines(checked)
    try:
        with engines.executor() as executor:
            yield executor, checked.target, checked.num_gpus
    finally:
        engines.close()


def require_planted(config: EngineConfig, requests: list[Request], texts: list[Texts]) -> int:
    """How many greedy texts are the planted ones. Raises RuntimeError for another."""
    if config.weights["load_format"] == "auto":
        return 0
    count = 0
    for request, (text, *_) in zip(requests, texts, strict=True):
        sampling = request.sampling_config
        if not sampling.is_greedy or sampling.repetition_penalty != 1:
            continue
        count += 1
        if list(text) != planted_text(config.weights, request.input_token_ids[-1], len(text)):
            raise RuntimeError(f"not the planted text: {text}")
    return count


def prompt_ids(config: EngineConfig) -> tuple[int, int]:
    """Of planted weights those that have a successor."""
    if config.weights["load_format"] == "auto":
        return 2, int(config.pretrained_config["vocab_size"])
    first, stop = config.weights["ordinary_tokens"]
    return int(first), int(stop)


def method_of(given: argparse.Namespace) -> DraftMethod:
    """What drafts."""
    if given.ngram:
        return NgramLookup(None, NGRAM)
    return DraftEngine(given.draft_engine) if given.draft_engine else PlainDecoding()


def options_of(given: argparse.Namespace, engine: Path, method: DraftMethod) -> EngineOptions:
    """Of one of both engines, which may have one rank and several."""
    has_ranks = read_engine_config(engine).num_ranks > 1
    return EngineOptions(
        engine,
        method,
        max_tokens=given.max_tokens,
        ranks_on_one_device=given.ranks_on_one_device and has_ranks,
    )


def soak(given: argparse.Namespace) -> list[str]:
    """What is wrong."""
    before, others = set(_SHM.iterdir()) if _SHM.exists() else set(), set(children())
    generator = np.random.default_rng(given.seed)
    alone = given.alone or given.engine
    with opened(options_of(given, alone, PlainDecoding())) as (executor, config, _):
        build = config.build_config
        longest = int(build["max_seq_len"]) - MOST_NEW
        requests = make_requests(generator, prompt_ids(config), longest, given.requests)
        wanted = run_alone(executor, requests)
        planted = require_planted(config, requests, wanted)
    print(f"alone: {len(requests)} requests of {alone}, {planted} planted texts", flush=True)
    wrong, totals, memory = [], [], []
    options = options_of(given, given.engine, method_of(given))
    with opened(options) as (executor, config, gpus):
        followers = sorted({*children()} - others)
        most = 2 * int(config.build_config["max_batch_size"])
        began = time.monotonic()
        for _ in range(PARTS):
            totals.append(
                run_for(executor, requests, wanted, given.seconds / PARTS, generator, most)
            )
            memory.append((resident_bytes(), device_bytes(gpus)))
            wrong += totals[-1].wrong
        elapsed = time.monotonic() - began
        used = executor.get_latest_iteration_stats()[-1].kv_cache_stats.used_num_blocks
        stats = executor.get_speculation_stats()
    report(totals, elapsed, stats.accepted_tokens, memory, followers)
    wrong += [f"{used} blocks are still used"] * (used > 0)
    (first, devices), (last, devices_now) = memory[PARTS // 2 - 1], memory[-1]
    wrong += [f"memory grew by {(last - first) >> 20} MiB"] * (last - first > MOST_GROWTH)
    grown = [now - then for then, now in zip(devices, devices_now, strict=True)]
    wrong += [f"a GPU's by {g >> 20} MiB" for g in grown if g > MOST_DEVICE_GROWTH]
    wrong += [f"process {pid} is left" for pid in followers if Path(f"/proc/{pid}").exists()]
    left = set(_SHM.iterdir()) - before if _SHM.exists() else set()
    return wrong + [f"{path} is left" for path in left if path.owner() == _user()]


def report(
    totals: list[Totals],
    elapsed: float,
    accepted: int,
    memory: list[tuple[int, list[int]]],
    followers: list[int],
) -> None:
    """One line each: what ran, and what it took."""
    requests, tokens = sum(t.requests for t in totals), sum(t.tokens for t in totals)
    cancelled = sum(t.cancelled for t in totals)
    print(
        f"{elapsed:.0f} s: {requests} requests, {cancelled} cancelled, {tokens} tokens, "
        f"{accepted} accepted drafts, {len(followers)} other processes"
    )
    for resident, devices in memory:
        print(f"memory: {resident >> 20} MiB; of GPUs {[taken >> 20 for taken in devices]} MiB")


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", type=Path)
    parser.add_argument("--draft-engine", type=Path)
    parser.add_argument("--ngram", action="store_true")
    parser.add_argument("--alone", type=Path, help="engine whose texts are wanted")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--max-tokens", type=int, help="of the KV cache")
    parser.add_argument("--ranks-on-one-device", action="store_true")
    wrong = soak(parser.parse_args())
    for line in wrong[:10]:
        print(f"wrong: {line}")
    print(f"{len(wrong)} wrong" if wrong else "all right")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
