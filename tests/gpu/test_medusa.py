"""Medusa heads on a GPU: the tokens of plain decoding, alone, together and over reused blocks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.e2e import TREE_LEN, llmctl, run_all
from support.gpu import quantize
from support.medusa import fit_heads, save_heads
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request, SamplingConfig

NUM_HEADS = 4
SAMPLING = (
    SamplingConfig(),
    SamplingConfig(temperature=0.8, top_k=0, seed=5),
    SamplingConfig(repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingConfig(temperature=1.1, top_k=40, top_p=0.9, min_p=0.02, seed=4),
)


@pytest.fixture(scope="module")
def ids(repository: Path) -> list[int]:
    tokenizer = Tokenizer.from_file(str(repository / "examples/demo-target/tokenizer.json"))
    text = (repository / "examples/heldout.txt").read_text()
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def heads(repository: Path, ids: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads that know a little of the held-out text."""
    checkpoint = repository / "examples/demo-target"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    return save_heads(
        tmp_path_factory.mktemp("heads"), fit_heads(model, ids[:4096], NUM_HEADS, 4096)
    )


@pytest.fixture(scope="module")
def requests(ids: list[int]) -> list[Request]:
    lengths = (1, 31, 33, 150, 64, 5)
    return [
        Request(
            tuple(ids[97 * index : 97 * index + lengths[index % len(lengths)]]),
            5 + 7 * index % 60,
            SAMPLING[index % len(SAMPLING)],
            end_id=1,
            max_draft_len=(None, None, 0, 3)[index // 3 % 4],
        )
        for index in range(32)
    ]


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_heads_change_no_token(
    kind: str, heads: Path, requests: list[Request], repository: Path, tmp_path: Path
) -> None:
    checkpoint = repository / "examples/demo-target"
    options: list[object] = ["--dtype", kind]
    if kind == "fp8":
        checkpoint, options = quantize(checkpoint, tmp_path / "checkpoint"), []
    options += ["--max-batch-size", 16, "--max-seq-len", 1024, "--backend", "cuda"]
    llmctl("build", "--checkpoint-dir", checkpoint, "--output-dir", tmp_path / "engine",
           "--speculative-decoding-mode", "medusa", "--draft-model-dir", heads,
           "--max-draft-len", TREE_LEN, *options)  # fmt: skip

    def opened(method: DraftMethod) -> OpenEngines:
        return OpenEngines(
            check_engines(EngineOptions(tmp_path / "engine", method, max_tokens=16384))
        )

    with opened(PlainDecoding()).executor() as executor:
        plain = [run_all(executor, [request])[0] for request in requests]
    with opened(Medusa()).executor() as executor:
        assert [run_all(executor, [request])[0] for request in requests] == plain
        assert run_all(executor, requests) == plain, "all together"
        assert run_all(executor, requests) == plain, "with blocks that are reused"
        stats = executor.get_speculation_stats()
    assert stats.accepted_tokens > 100
    assert len(stats.accepted_at_position) >= 3, "paths of several tokens are accepted"
