"""Blocks that leave a GPU and come back, and rings of blocks: the tokens are those without them."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from e2e_support import DRAFT_LEN, Outputs, llmctl, run_all

from llmctl.runtime.attention_windows import WindowOptions, cache_window
from llmctl.runtime.core import Request, SamplingConfig
from llmctl.runtime.cuda_open import OpenedPair, plan_pair
from llmctl.runtime.cuda_rounds import CudaRoundRunner
from llmctl.runtime.executor import Executor, ExecutorConfig, KvCacheConfig
from llmctl.runtime.kv_cache import KvCacheStats
from llmctl.runtime.speculative.draft_target import DraftTargetDrafter

WINDOW = 64
MAX_SEQ_LEN = 1500
MANY_BLOCKS = 600
FEW_BLOCKS = 24  # of 32 tokens
LIMITS = ("--max-batch-size", 8, "--max-seq-len", MAX_SEQ_LEN, "--dtype", "bfloat16")
KINDS = ("full", "window")


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


def load(folder: Path, kind: str) -> OpenedPair:
    return plan_pair(
        folder / f"{kind}-target", folder / f"{kind}-draft", max_tokens=32 * MANY_BLOCKS
    ).load()


def run(
    opened: OpenedPair, requests: list[Request], config: KvCacheConfig, *, draft: bool,
    at_once: bool = False,
) -> tuple[Outputs, list[KvCacheStats]]:  # fmt: skip
    """Outputs, all requests together or one after another, and the cache after every step."""
    drafter, engine = None, None
    if draft:
        assert opened.draft is not None
        engine = opened.draft
        drafter = DraftTargetDrafter(engine, DRAFT_LEN)
    runner = CudaRoundRunner(opened.target, engine, DRAFT_LEN if draft else 0)
    settings = ExecutorConfig(config, check_invariants=True, iter_stats_max_iterations=100_000)
    with Executor(opened.target, drafter, settings, opened.sampling, runner) as executor:
        if at_once:
            outputs = run_all(executor, requests)
        else:
            outputs = [run_all(executor, [request])[0] for request in requests]
        stats = [item.kv_cache_stats for item in executor.get_latest_iteration_stats()]
    executor._worker.kv_cache.check_invariants()
    return outputs, stats


def check_host_tier(opened: OpenedPair, prompts: list[tuple[int, ...]], draft: bool) -> None:
    """Prompts that return when the device has long forgotten them."""
    requests = [
        Request((*prompt, 50 + turn), 20, SamplingConfig(0.8, 0, seed=turn))
        for turn in range(3)
        for prompt in prompts
    ]
    plain = KvCacheConfig(MANY_BLOCKS, enable_block_reuse=False)
    wanted, _ = run(opened, requests, plain, draft=False)
    for at_once in (False, True):
        config = KvCacheConfig(FEW_BLOCKS, num_host_blocks=200)
        found, stats = run(opened, requests, config, draft=draft, at_once=at_once)
        assert found == wanted
        assert stats[-1].onboarded_blocks > 30 and stats[-1].token_hit_rate > 0.4


def check_ring(opened: OpenedPair, prompts: list[tuple[int, ...]], draft: bool) -> None:
    """Long generations with every block kept, then in a ring."""
    requests = [Request(prompt, 600, SamplingConfig(0.8, 0, seed=5)) for prompt in prompts[:6]]
    wanted, _ = run(opened, requests, KvCacheConfig(MANY_BLOCKS), draft=False, at_once=True)
    assert opened.draft is not None
    plans = [opened.target.plan, opened.draft.plan]
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
def test_a_ring_of_blocks_gives_what_the_whole_cache_gives(
    folder: Path, repository: Path, draft: bool
) -> None:
    check_ring(load(folder, "window"), prompts_of(repository / "examples"), draft)
