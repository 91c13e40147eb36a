"""The demo pair on a GPU: the same tokens alone, batched and with drafts, and the cpu's logits.

FP8 checkpoints have plain scales (gpu_support.py), so nothing but the demo models is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from support.e2e import DRAFT_LEN, Outputs, llmctl, run_all
from support.gpu import quantize
from support.tree_drafter import RandomTrees

from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.schemes.table import FP8, MXFP4
from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.kv_cache.attention_windows import WindowOptions
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import OutputConfig, Request, SamplingConfig

# int8: of the KV cache; mxfp4: of the weights; windows: asked for by run
KINDS = ("bfloat16", "fp8", "int8", "mxfp4", "windows")
WINDOWS = WindowOptions((96,), 4)
SAMPLING = (
    SamplingConfig(),
    SamplingConfig(temperature=0.8, top_k=0, seed=3 << 40),
    SamplingConfig(temperature=1.2, top_k=40, top_p=0.9, min_p=0.02, seed=4),
    SamplingConfig(repetition_penalty=1.3, frequency_penalty=0.2),
    SamplingConfig(temperature=0.9, top_k=0, seed=6, min_tokens=4),
    SamplingConfig(),
)


@dataclass
class Engines:
    """The demo pair by (role, kind, backend), built and opened on first use."""

    folder: Path
    examples: Path
    opened: dict[tuple[str, str | None], OpenEngines] = field(default_factory=dict)

    def path(self, role: str, kind: str, backend: str = "cuda") -> Path:
        kind = "fp8" if kind == "windows" else kind
        path = self.folder / f"{role}-{kind}-{backend}"
        if not path.exists():
            checkpoint = self.examples / f"demo-{role}"
            options: list[object] = ["--max-batch-size", 16, "--max-seq-len", 1024]
            if role == "target":
                options += ["--max-draft-len", DRAFT_LEN]
            if kind in ("fp8", "int8", "mxfp4"):
                quantized = self.folder / f"{role}-{kind}-checkpoint"
                if not quantized.exists():
                    kv_algo = "INT8" if kind == "int8" else "FP8"
                    scheme = MXFP4 if kind == "mxfp4" else FP8
                    quantize(checkpoint, quantized, kv_algo, scheme)
                checkpoint = quantized
            else:
                options += ["--dtype", kind]
            llmctl("build", "--backend", backend, "--checkpoint-dir", checkpoint,
                   "--output-dir", path, *options)  # fmt: skip
        return path

    def open(self, kind: str, draft: str | None) -> OpenEngines:
        """draft: None, "ngram", "engine" or "logits" (the engine, accepted by logits)."""
        known = self.opened.get((kind, draft))
        if known is None:
            method: DraftMethod = PlainDecoding()
            if draft == "ngram":
                method = NgramLookup(DRAFT_LEN, 3)
            elif draft is not None:
                method = DraftEngine(self.path("draft", kind), DRAFT_LEN)
                if draft == "logits":
                    method = replace(method, acceptance="logits")
            options = EngineOptions(self.path("target", kind), method, max_tokens=16384)
            if kind == "windows":
                options = replace(options, windows=WINDOWS)
            known = self.opened[kind, draft] = OpenEngines(check_engines(options))
        return known

    @contextmanager
    def executor(self, kind: str, draft: str | None, **options: bool) -> Iterator[Executor]:
        with self.open(kind, draft).executor(**options) as executor:
            yield executor


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Engines:
    return Engines(tmp_path_factory.mktemp("engines"), repository / "examples")


@pytest.fixture(scope="module")
def prompt(repository: Path) -> Callable[[int, int], tuple[int, ...]]:
    """prompt(start, length): ids of the held-out text."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(repository / "examples/demo-target/tokenizer.json"))
    text = (repository / "examples/heldout.txt").read_text()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return lambda start, length: tuple(ids[start : start + length])


@pytest.fixture(scope="module")
def requests(prompt: Callable[[int, int], tuple[int, ...]]) -> list[Request]:
    lengths = (1, 2, 31, 32, 33, 150, 64, 5)
    return [
        Request(
            prompt(97 * index, lengths[index % len(lengths)]),
            5 + 7 * index % 60,
            SAMPLING[index % len(SAMPLING)],
            OutputConfig(return_log_probs=index % 11 == 10),
            end_id=1,
            bad_words=((300,), (301, 302)) if index % 13 == 12 else (),
        )
        for index in range(48)
    ]


@pytest.fixture(scope="module")
def plain_alone(engines: Engines, requests: list[Request]) -> Callable[[str], Outputs]:
    """One request at a time, no draft, no reuse across requests of another setting."""
    known: dict[str, Outputs] = {}

    def outputs(kind: str) -> Outputs:
        if kind not in known:
            with engines.executor(kind, None) as executor:
                known[kind] = [run_all(executor, [request])[0] for request in requests]
        return known[kind]

    return outputs


def test_windows_change_the_text(plain_alone: Callable[[str], Outputs]) -> None:
    assert plain_alone("windows") != plain_alone("fp8")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("draft", [None, "engine", "ngram"])
def test_batched_output_equals_plain_output_alone(
    engines: Engines,
    requests: list[Request],
    plain_alone: Callable[[str], Outputs],
    kind: str,
    draft: str | None,
) -> None:
    wanted = plain_alone(kind)  # by an executor of its own
    with engines.executor(kind, draft) as executor:
        assert run_all(executor, requests) == wanted
        stats = executor.get_speculation_stats()
    assert (stats.accepted_tokens > 0) == (draft is not None)


@pytest.mark.parametrize("kind", KINDS)
def test_speculative_output_alone_equals_plain_output_alone(
    engines: Engines,
    requests: list[Request],
    plain_alone: Callable[[str], Outputs],
    kind: str,
) -> None:
    with engines.executor(kind, "engine") as executor:
        alone = [run_all(executor, [request])[0] for request in requests]
    assert alone == plain_alone(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_trees_change_no_token(
    engines: Engines,
    requests: list[Request],
    plain_alone: Callable[[str], Outputs],
    kind: str,
) -> None:
    method = RandomTrees(DRAFT_LEN, plain_alone(kind))
    options = EngineOptions(engines.path("target", kind), method, max_tokens=16384)
    if kind == "windows":
        options = replace(options, windows=WINDOWS)
    with OpenEngines(check_engines(options)).executor() as executor:
        assert run_all(executor, requests) == plain_alone(kind)
        assert executor.get_speculation_stats().accepted_tokens > 200
        assert run_all(executor, requests) == plain_alone(kind), "with blocks that are reused"


def test_greedy_output_accepted_by_logits_equals_plain_output(
    engines: Engines, requests: list[Request], plain_alone: Callable[[str], Outputs]
) -> None:
    greedy = [i for i, r in enumerate(requests) if r.sampling_config.is_greedy]
    with engines.executor("bfloat16", "logits") as executor:
        outputs = run_all(executor, requests)
    assert [outputs[i] for i in greedy] == [plain_alone("bfloat16")[i] for i in greedy]


def steps(ids: tuple[int, ...], size: int, chunks: tuple[int, ...]) -> Iterator[StepInputs]:
    """One request read in chunks, with logits of each chunk's last tokens."""
    table = np.arange(-(-len(ids) // size), dtype=np.int32)[::-1].copy()
    start = 0
    for count in chunks:
        positions = np.arange(start, start + count, dtype=np.int32)
        yield StepInputs(
            token_ids=np.array(ids[start : start + count], np.int32),
            position_ids=positions,
            cu_q=np.array([0, count], np.int32),
            kv_len=np.array([start + count], np.int32),
            block_tables=table[None],
            slot_mapping=table[positions // size] * np.int32(size) + positions % np.int32(size),
            logit_rows=np.arange(max(0, count - DRAFT_LEN - 1), count, dtype=np.int32),
        )
        start += count


CHUNKS = (200, 1, 1, 1, 3, 3, DRAFT_LEN + 1, DRAFT_LEN + 1, 64, 1, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_agree_with_the_cpu_backend(
    engines: Engines, prompt: Callable[[int, int], tuple[int, ...]], kind: str
) -> None:
    """Prompt chunks, decoding and verification, launched directly and replayed."""
    from llmctl.runtime.engines.engine import open_cpu_engine

    windows = WINDOWS if kind == "windows" else WindowOptions()
    reference = open_cpu_engine(engines.path("target", kind, "cpu"), windows)
    target = engines.open(kind, None).target
    ids = prompt(1000, sum(CHUNKS))
    num_blocks = -(-len(ids) // target.tokens_per_block)
    reference.allocate_kv_cache(num_blocks)
    target.allocate_kv_cache(engines.open(kind, None).kv_plan.num_blocks)
    errors = []
    for step in steps(ids, target.tokens_per_block, CHUNKS):
        wanted = reference.run(step).astype(np.float64)
        found = target.run(step).numpy()
        assert found.shape == wanted.shape and np.isfinite(found).all()
        errors.append(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    # Both round to bfloat16 (and FP8) where the references do, in another order of sums.
    assert max(errors) < (0.02 if kind == "bfloat16" else 0.06), errors


def test_bits_do_not_depend_on_the_chunks_or_on_graphs(
    engines: Engines, prompt: Callable[[int, int], tuple[int, ...]]
) -> None:
    opened = engines.open("fp8", None)
    target = opened.target
    target.allocate_kv_cache(opened.kv_plan.num_blocks)
    ids = prompt(3000, 200)
    size = target.tokens_per_block
    found = []
    for chunks in ((200,), (128, 72), (195, 1, 1, 1, 1, 1), (195, 5), (195, 5), (100, 99, 1)):
        for step in steps(ids, size, chunks):
            last = target.run(step)[-1:].numpy()
        found.append(last)
    assert all((row == found[0]).all() for row in found)


def test_run_prints_the_plan_and_the_loading_speed(engines: Engines) -> None:
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-m", "llmctl.cli.entry", "run", "--engine-dir",
         engines.path("target", "fp8"), "--draft-engine", engines.path("draft", "fp8"),
         "--max-output-len", "20", "--input-text", "Once upon a time", "--verify-exact"],
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in ("device: NVIDIA", "device memory, GB", "GB/s", "backend cuda", "exact: "):
        assert words in done.stderr, done.stderr
