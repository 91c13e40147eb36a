"""Blocks that leave a GPU and come back, and rings of blocks: the tokens are those without them."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.e2e import DRAFT_LEN, Outputs, llmctl, run_all

from llmctl.runtime.api.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.drafting.draft_engine.device import DeviceDraftEngine
from llmctl.runtime.drafting.draft_engine.drafter import DraftEngineDrafter
from llmctl.runtime.drafting.drafter import DeviceDrafter, Drafter
from llmctl.runtime.drafting.plain.device import NoDeviceDrafter
from llmctl.runtime.drafting.plain.drafter import NoDrafter
from llmctl.runtime.engines.open_cuda import LoadedEngines, plan_engines
from llmctl.runtime.kv_cache import KvCacheStats
from llmctl.runtime.kv_cache.attention_windows import WindowOptions, cache_window
from llmctl.runtime.request import Request, SamplingConfig
from llmctl.runtime.rounds.cuda_rounds import CudaRoundRunner

WINDOW = 64
MAX_SEQ_LEN = 1500
MANY_BLOCKS = 600
FEW_BLOCKS = 24  # of 32 tokens
LIMITS = ("--max-batch-size", 8, "--max-seq-len", MAX_SEQ_LEN, "--dtype", "bfloat16")
KINDS = ("full", "window")
CYCLES_PER_S = 1.8e9


def build(folder: Path, examples: Path, kind: str, role: str) -> None:
    """An engine of a demo model, as it is or as a Mistral with a window in every layer."""
    checkpoint = examples / f"demo-{role}"
    if kind == "window":
        copy = folder / f"{role}-checkpoint"
        shutil.copytree(checkpoint, copy)
        config = json.loads((copy / "config.json").read_text())
        for key in ("attention_bias", "mlp_bias", "rope_scaling"):
            del config[key]
        config |= {
            "architectures": ["MistralForCausalLM"],
            "model_type": "mistral",
            "sliding_window": WINDOW,
        }
        (copy / "config.json").write_text(json.dumps(config))
        checkpoint = copy
    drafts = ("--max-draft-len", DRAFT_LEN, "--max-num-tokens", 128) if role == "target" else ()
    llmctl("build", "--backend", "cuda", "--checkpoint-dir", checkpoint,
           "--output-dir", folder / f"{kind}-{role}", *LIMITS, *drafts)  # fmt: skip


def build_all(folder: Path, examples: Path) -> None:
    with ThreadPoolExecutor() as pool:
        jobs = [
            pool.submit(build, folder, examples, kind, role)
            for kind in KINDS
            for role in ("target", "draft")
        ]
        for job in jobs:
            job.result()


def load(folder: Path, kind: str) -> LoadedEngines:
    folders = {role: folder / f"{kind}-{role}" for role in ("target", "draft")}
    return plan_engines(folders, max_tokens=32 * MANY_BLOCKS).load()


def run(
    opened: LoadedEngines, requests: list[Request], config: KvCacheConfig, *, draft: bool,
    at_once: bool = False, pause_s: Callable[[], float] | None = None,
) -> tuple[Outputs, list[KvCacheStats]]:  # fmt: skip
    """Outputs, all requests together or one after another, and the cache after every step. With
    `pause_s` the link between host and device rests for so long before every move."""
    with open_executor(opened, config, draft=draft) as executor:
        if pause_s is not None:
            slow_link(opened, pause_s)
        if at_once:
            outputs = run_all(executor, requests)
        else:
            outputs = [run_all(executor, [request])[0] for request in requests]
        stats = [item.kv_cache_stats for item in executor.get_latest_iteration_stats()]
    executor._worker.kv_cache.check_invariants()
    return outputs, stats


def open_executor(opened: LoadedEngines, config: KvCacheConfig, *, draft: bool) -> Executor:
    drafter: Drafter = NoDrafter()
    device_drafter: DeviceDrafter = NoDeviceDrafter()
    if draft:
        engine = opened.engines["draft"]
        drafter = DraftEngineDrafter(engine, DRAFT_LEN)
        device_drafter = DeviceDraftEngine(engine, DRAFT_LEN)
    runner = CudaRoundRunner(opened.target, device_drafter)
    settings = ExecutorConfig(config, check_invariants=True, iter_stats_max_iterations=100_000)
    return Executor(opened.target, drafter, settings, opened.sampling, runner)


def slow_link(opened: LoadedEngines, pause_s: Callable[[], float]) -> None:
    """Let every move beside the steps begin with a pause."""
    caches = [cache for engine in opened.engines.values() for cache in engine._paged.values()]
    for blocks in (cache._host_blocks for cache in caches):
        for stream in () if blocks is None else (blocks._in, blocks._out):
            stream.run = late(type(stream).run, stream, pause_s)  # a double


def late(run: Callable, stream: object, pause_s: Callable[[], float]) -> Callable:
    def paused(work: Callable[[], None]) -> None:
        run(stream, lambda: torch.cuda._sleep(int(CYCLES_PER_S * pause_s())))
        run(stream, work)

    return paused


def check_host_tier(opened: LoadedEngines, prompts: list[tuple[int, ...]], draft: bool) -> None:
    """Prompts that return when the device has long forgotten them."""
    requests = [
        Request((*prompt, 50 + turn), 20, SamplingConfig(0.8, 0, seed=turn))
        for turn in range(3)
        for prompt in prompts
    ]
    plain = KvCacheConfig(MANY_BLOCKS, enable_block_reuse=False)
    wanted, _ = run(opened, requests, plain, draft=False)
    chance = random.Random(3)
    for at_once in (False, True):
        for pause_s in (None, lambda: chance.choice([0, 1e-4, 3e-3])):
            config = KvCacheConfig(FEW_BLOCKS, num_host_blocks=200)
            found, stats = run(
                opened, requests, config, draft=draft, at_once=at_once, pause_s=pause_s
            )
            assert found == wanted
            assert stats[-1].onboarded_blocks > 30 and stats[-1].token_hit_rate > 0.4


def check_others_run(opened: LoadedEngines, prompts: list[tuple[int, ...]], draft: bool) -> None:
    """While blocks take a tenth of a second to come back, another request gets its tokens."""
    other = Request(prompts[0], 390, SamplingConfig(0.8, 0, seed=1), streaming=True)
    back = Request((*prompts[1], 9), 20, SamplingConfig(0.8, 0, seed=2), streaming=True)
    plain = KvCacheConfig(MANY_BLOCKS, enable_block_reuse=False)
    wanted, _ = run(opened, [Request(r.input_token_ids, r.max_tokens, r.sampling_config)
                             for r in (other, back)], plain, draft=False)  # fmt: skip
    config = KvCacheConfig(FEW_BLOCKS, num_host_blocks=200)
    for _ in range(2):  # graphs are captured in the first, which waits for the whole device
        with open_executor(opened, config, draft=draft) as executor:
            run_all(executor, [Request(prompt, 20) for prompt in prompts[1:]])
            slow_link(opened, lambda: 0.1)
            found: dict[int, list[int]] = {}
            first = executor.enqueue_request(other)
            while len(found.get(first, ())) < 8:
                take(executor, found)
            second = executor.enqueue_request(back)
            num_before = len(found[first])
            while second not in found:
                take(executor, found)
            num_meanwhile = len(found[first]) - num_before
            while len(found[first]) < other.max_tokens or len(found[second]) < back.max_tokens:
                take(executor, found)
            last = executor.get_latest_iteration_stats()[-1]
    onboarded = last.kv_cache_stats.onboarded_blocks
    print(f"{num_meanwhile} tokens of another request while {onboarded} blocks came back")
    assert onboarded >= 2 and num_meanwhile >= 10
    assert last.pinned_mem_usage >= config.num_host_blocks * opened.target.kv_bytes_per_block
    assert wanted == [[tuple(found[first])], [tuple(found[second])]]


def take(executor: Executor, found: dict[int, list[int]]) -> None:
    """Add what has come, by request."""
    for response in executor.await_responses():
        assert response.result is not None, response.error
        found.setdefault(response.request_id, []).extend(response.result.output_token_ids)


def check_next_turn(opened: LoadedEngines, prompts: list[tuple[int, ...]], draft: bool) -> None:
    """What was generated is found when the conversation goes on, with the same answers."""
    plain = KvCacheConfig(MANY_BLOCKS, enable_block_reuse=False)
    reusing = KvCacheConfig(MANY_BLOCKS)
    said, requests, found, reused = prompts[0], [], [], []
    with open_executor(opened, reusing, draft=draft) as executor:
        for turn in range(3):
            requests.append(Request((*said, 40 + turn), 150, SamplingConfig(0.8, 0, seed=turn)))
            found += run_all(executor, requests[-1:])
            said = (*requests[-1].input_token_ids, *found[-1][0])
            stats = executor.get_latest_iteration_stats()[-1].kv_cache_stats
            reused.append(stats.reused_tokens - sum(reused))
    assert found == run(opened, requests, plain, draft=False)[0]
    for request, tokens in zip(requests[1:], reused[1:], strict=True):
        assert tokens >= len(request.input_token_ids) - 2 - 32, "all of the last turn but a block"


def check_ring(opened: LoadedEngines, prompts: list[tuple[int, ...]], draft: bool) -> None:
    """Long generations with every block kept, then in a ring."""
    requests = [Request(prompt, 600, SamplingConfig(0.8, 0, seed=5)) for prompt in prompts[:6]]
    wanted, _ = run(opened, requests, KvCacheConfig(MANY_BLOCKS), draft=False, at_once=True)
    plans = [engine.plan for engine in opened.engines.values()]
    window = cache_window(plans, WindowOptions(), MAX_SEQ_LEN)
    assert window is not None and window.size == WINDOW
    config = KvCacheConfig(120, window=window)
    found, _ = run(opened, requests, config, draft=draft, at_once=True)
    assert found == wanted
    long = [Request(prompts[0], 1300)]
    _, stats = run(opened, long, config, draft=draft)
    used = [item.used_num_blocks for item in stats]
    assert max(used[-20:]) <= max(used[:20]) < 1300 // 32 // 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Path:
    path = tmp_path_factory.mktemp("engines")
    build_all(path, repository / "examples")
    return path


def prompts_of(examples: Path) -> list[tuple[int, ...]]:
    """Twelve pieces of the held-out text, of 90 tokens and more."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(examples / "demo-target/tokenizer.json"))
    ids = tokenizer.encode((examples / "heldout.txt").read_text(), add_special_tokens=False).ids
    return [tuple(ids[start : start + 90 + start % 40]) for start in range(0, 3600, 300)]


@pytest.mark.parametrize("draft", [False, True])
def test_prompts_that_come_back_from_host_memory_have_the_same_answers(
    folder: Path, repository: Path, draft: bool
) -> None:
    check_host_tier(load(folder, "full"), prompts_of(repository / "examples"), draft)


@pytest.mark.parametrize("draft", [False, True])
def test_others_run_while_blocks_come_back(folder: Path, repository: Path, draft: bool) -> None:
    check_others_run(load(folder, "full"), prompts_of(repository / "examples"), draft)


@pytest.mark.parametrize("draft", [False, True])
def test_the_next_turn_finds_what_was_generated(
    folder: Path, repository: Path, draft: bool
) -> None:
    check_next_turn(load(folder, "full"), prompts_of(repository / "examples"), draft)


@pytest.mark.parametrize("draft", [False, True])
def test_a_ring_of_blocks_gives_what_the_whole_cache_gives(
    folder: Path, repository: Path, draft: bool
) -> None:
    check_ring(load(folder, "window"), prompts_of(repository / "examples"), draft)
