"""An EAGLE head on a GPU: the tokens of plain decoding, alone, together, in chunks and over reused
blocks; what the head computes, against the cpu backend."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.counted_rounds import CountedRounds
from support.e2e import KINDS, Outputs, cancel_some, llmctl, run_all
from support.eagle import fit_head, make_head, save_head
from support.eagle_steps import CHUNKS, computed
from support.gpu import quantize, quantize_head
from support.gpu_drafting import (
    lengths_of_device_and_host,
    opened,
    plain_texts,
    run_chosen,
    run_in_every_company,
    run_narrow_windows,
)
from transformers import AutoModelForCausalLM

from llmctl.builder.engine_format import parse_choices
from llmctl.runtime.drafting.eagle.method import Eagle
from llmctl.runtime.engines.engine import open_cpu_engine
from llmctl.runtime.request import Request

DRAFT_LEN = 5
CHOICES = parse_choices("[[0],[1],[2],[0,0],[0,1],[1,0],[0,0,0],[0,0,1],[0,0,0,0],[1,0,0]]")
TREES = {"dynamic": Eagle(num_offers=4), "static": Eagle(choices=CHOICES)}
WIDTH = 384  # of the demo target


# Of the head against the cpu backend, relative, where both round as the references do, in another
# order of sums. Features of an FP8 target differ most.
LARGEST_ERROR = {"bfloat16": 0.04, "float16": 0.006, "fp8": 0.1}


@pytest.fixture(scope="module", params=LARGEST_ERROR)
def dtype(request: pytest.FixtureRequest) -> str:
    """Of the target; fp8: of its KV cache, too."""
    return str(request.param)


@pytest.fixture(scope="module")
def build(dtype: str, repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """build(name, head, backend, ...) -> the demo target's engine. Head None: without one."""
    folder = tmp_path_factory.mktemp("engines")
    checkpoint, options = repository / "examples/demo-target", ["--dtype", dtype]
    if dtype == "fp8":
        checkpoint, options = quantize(checkpoint, folder / "checkpoint"), []

    def built(name: str, head: Path | None, backend: str = "cuda", *more: object) -> Path:
        path = folder / name
        mode = ["--speculative-decoding-mode", "eagle", "--draft-model-dir", head]
        llmctl("build", "--checkpoint-dir", checkpoint, "--output-dir", path, "--backend", backend,
               "--max-batch-size", 16, "--max-seq-len", 1024, *options,
               *(mode if head else []), *more)  # fmt: skip
        return path

    return built


@pytest.fixture(scope="module")
def bare(build: Any) -> Path:
    path: Path = build("bare", None)
    return path


@pytest.fixture(scope="module")
def plain(bare: Path, requests: list[Request]) -> Outputs:
    """Of each request alone, of an engine without a head."""
    return plain_texts(bare, requests)


@pytest.fixture(scope="module")
def head(requests: list[Request], plain: Outputs, repository: Path, tmp_path_factory: Any) -> Path:
    """One that knows what comes of the requests."""
    folder: Path = tmp_path_factory.mktemp("head")
    model = AutoModelForCausalLM.from_pretrained(
        repository / "examples/demo-target", dtype=torch.float32
    )
    texts = [
        (list(request.input_token_ids), list(output[0]))
        for request, output in zip(requests, plain, strict=True)
    ]
    fit_head(model.eval(), texts).write(folder, "demo-target")
    return folder


@pytest.fixture(scope="module")
def engine(build: Any, head: Path) -> Path:
    path: Path = build("engine", head)
    return path


@pytest.mark.parametrize("draft_len", [None, 1, 2])
def test_a_head_that_knows_the_text_changes_no_token(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    draft_len: int | None,
    rounds: CountedRounds,
) -> None:
    """Rounds on the device, and between them steps of the host: prompts, penalties, own lengths."""
    stats = run_in_every_company(engine, Eagle(draft_len), requests, plain)
    assert stats.accepted_tokens > 150
    assert len(stats.accepted_at_position) == (draft_len or DRAFT_LEN), "whole chains"
    print(f"rounds on the device: {rounds.total}, ahead of the host: {rounds.ahead}")
    assert rounds.total > 60 and rounds.ahead > 30, "the host was never behind"


def test_batches_that_never_need_the_host(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    rounds: CountedRounds,
) -> None:
    run_chosen(engine, Eagle(), requests, plain, device_requests, max_num_tokens=300)
    assert rounds.ahead > 30 and rounds.drafts == DRAFT_LEN * rounds.total


def test_lengths_that_adapt_change_no_token(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    rounds: CountedRounds,
) -> None:
    """Rounds without drafts among them: the head reads those, too."""
    run_chosen(engine, Eagle(), requests, plain, device_requests, adaptive_draft_len=True)
    assert rounds.total > 50


def test_the_device_accepts_what_the_host_would(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    rounds: CountedRounds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One by one: but for the last few tokens of a sequence the chains are the same."""
    asked = requests, plain, device_requests, rounds, monkeypatch
    device, host = lengths_of_device_and_host(engine, Eagle(), *asked)
    assert abs(device / host - 1) < 0.03


@pytest.mark.parametrize("reuse", [False, True])
def test_chunks_and_narrow_steps_change_no_token(
    engine: Path, requests: list[Request], plain: Outputs, reuse: bool
) -> None:
    """Prompts enter in chunks beside the drafts of others, or from the cache."""
    options = {"max_num_tokens": 96, "enable_block_reuse": reuse, "max_batch_size": 9}
    with opened(engine, Eagle(), **options).executor() as executor:
        for _ in range(3):
            assert run_all(executor, requests) == plain
        assert executor.get_speculation_stats().accepted_tokens > 150


def test_blocks_that_leave_the_cache_and_return_change_no_token(
    engine: Path, requests: list[Request], plain: Outputs
) -> None:
    """The head's blocks go to host memory and back with the target's."""
    options = {"max_tokens": 40 * 32, "host_memory_bytes": 64 << 20}
    with opened(engine, Eagle(), **options).executor() as executor:
        for _ in range(3):
            assert run_all(executor, requests) == plain


def test_narrow_windows_change_no_token(bare: Path, engine: Path, requests: list[Request]) -> None:
    run_narrow_windows(bare, engine, Eagle(), requests)


def test_cancelled_requests_leave_the_others_alone(
    engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    rounds: CountedRounds,
) -> None:
    """All of them, and those alone that never need the host."""
    draw = random.Random(1)
    with opened(engine, Eagle()).executor() as executor:
        for chosen in (range(len(requests)), device_requests) * 4:
            asked = [requests[index] for index in chosen]
            cancel_some(executor, asked, [plain[index] for index in chosen], draw)
    assert rounds.total > 20


@pytest.fixture(scope="module")
def tree_engine(build: Any, head: Path) -> Path:
    limits = ["--max-draft-len", 16, "--max-non-leaves-per-layer", 5]
    path: Path = build("trees", head, "cuda", *limits)
    return path


@pytest.mark.parametrize("kind", TREES)
def test_trees_change_no_token(
    tree_engine: Path, requests: list[Request], plain: Outputs, kind: str, rounds: CountedRounds
) -> None:
    """Rounds on the device; sampled requests draft chains beside trees. Not run on a GPU yet."""
    stats = run_in_every_company(tree_engine, TREES[kind], requests, plain)
    assert stats.accepted_tokens > 150 and len(stats.accepted_at_position) >= 4
    print(f"rounds on the device: {rounds.total}, ahead of the host: {rounds.ahead}")
    assert rounds.total > 60 and rounds.ahead > 30, "the host was never behind"
    greedy = [replace(requests[index], max_draft_len=None) for index in range(0, 32, len(KINDS))]
    lengths = []
    for method in (Eagle(4), TREES[kind]):
        with opened(tree_engine, method).executor() as executor:
            run_all(executor, greedy)
            done = executor.get_speculation_stats()
        lengths.append(1 + done.accepted_tokens / done.rounds)
    print(f"tokens a round of greedy requests: chain {lengths[0]:.3f}, tree {lengths[1]:.3f}")
    assert lengths[1] > lengths[0] - 0.02, "keys of another path would show"
    options = {"max_num_tokens": 200, "max_batch_size": 9}
    with opened(tree_engine, TREES[kind], **options).executor() as executor:
        assert run_all(executor, requests) == plain, "in narrow steps"
        cancel_some(executor, requests, plain, random.Random(2))


@pytest.mark.parametrize("kind", TREES)
def test_the_device_grows_the_hosts_trees(
    tree_engine: Path,
    requests: list[Request],
    plain: Outputs,
    device_requests: list[int],
    kind: str,
    rounds: CountedRounds,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To the ends of the texts."""
    asked = requests, plain, device_requests, rounds, monkeypatch
    device, host = lengths_of_device_and_host(tree_engine, TREES[kind], *asked)
    assert abs(device / host - 1) < 0.01


def test_a_head_that_knows_nothing_changes_no_token(
    build: Any, requests: list[Request], plain: Outputs, tmp_path: Path
) -> None:
    """Of another width, with its own embedding, normalized features, q and k, and the other
    residual."""
    sizes: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 320, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 128, "vocab_size": 4096, "draft_vocab_size": 777,
    }  # fmt: skip
    tensors = make_head(7, target_hidden=WIDTH, own_embedding=True, qk_norm=True, fc_norm=True,
                        **sizes)  # fmt: skip
    other = {"target_hidden_size": WIDTH, "norm_before_residual": True, "fc_norm": True,
             "rope_theta": 5e5}  # fmt: skip
    folder = save_head(tmp_path / "head", tensors, "speculators", **sizes, **other)
    with opened(build("unknown", folder), Eagle()).executor() as executor:
        for _ in range(2):
            assert run_all(executor, requests) == plain
        assert executor.get_speculation_stats().draft_tokens > 500


def test_an_fp8_head_changes_no_token(
    build: Any,
    head: Path,
    requests: list[Request],
    plain: Outputs,
    rounds: CountedRounds,
    tmp_path: Path,
) -> None:
    """And still knows the text."""
    engine = build("fp8-head", quantize_head(head, tmp_path / "head"))
    with opened(engine, Eagle()).executor() as executor:
        for _ in range(2):
            assert run_all(executor, requests) == plain
        assert run_all(executor, requests[:1]) == plain[:1]
        stats = executor.get_speculation_stats()
    print(f"tokens a round with an FP8 head: {1 + stats.accepted_tokens / stats.rounds:.3f}")
    assert stats.accepted_tokens > 100 and rounds.total > 0


def test_a_head_computes_what_it_does_on_the_cpu(
    dtype: str, build: Any, engine: Path, head: Path, ids: list[int]
) -> None:
    """Its own cache included: drafts attend to pairs of several steps, prompts' and their own."""
    text = ids[1000 : 1000 + sum(CHUNKS) + 5]
    on_cpu = open_cpu_engine(build("cpu", head, "cpu"))
    on_cpu.allocate_kv_cache(16)
    on_gpu = opened(engine, Eagle())
    on_gpu.target.allocate_kv_cache(on_gpu.kv_plan.num_blocks)
    errors = []
    for found, wanted in zip(computed(on_gpu.target, text), computed(on_cpu, text), strict=True):
        assert found.shape == wanted.shape
        known = np.isfinite(wanted)
        assert (np.isfinite(found) == known).all(), "the same reduced vocabulary"
        errors.append(np.linalg.norm(found[known] - wanted[known]) / np.linalg.norm(wanted[known]))
    print(f"largest error: {max(errors):.4f}")
    assert len(errors) == 2 * 4 * len(CHUNKS) and max(errors) < LARGEST_ERROR[dtype], errors
