"""A ReDrafter head on a GPU: the tokens of plain decoding, alone, together and over reused blocks;
its steps against torch, and the likeliest tokens in their order."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.e2e import llmctl, run_all
from support.gpu import quantize
from support.gpu_drafting import opened
from support.redrafter import RECURRENCES, fit_head, make_head, save_as, save_head
from transformers import AutoModelForCausalLM

from llmctl.plugins.ops.beam_search.reference import top_log_probs
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.drafting.redrafter.method import RecurrentDrafting
from llmctl.runtime.request import Request


def build(checkpoint: Path, folder: Path, *options: object) -> Path:
    llmctl("build", "--checkpoint-dir", checkpoint, "--output-dir", folder, "--backend", "cuda",
           "--max-batch-size", 16, "--max-seq-len", 1024, *options)  # fmt: skip
    return folder


@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_a_head_changes_no_token(
    kind: str, requests: list[Request], repository: Path, tmp_path: Path
) -> None:
    """A head that knows what comes, and heads of every recurrence that know nothing."""
    checkpoint = repository / "examples/demo-target"
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    options: list[object] = ["--dtype", kind]
    if kind == "fp8":
        checkpoint, options = quantize(checkpoint, tmp_path / "checkpoint"), []
    bare = build(checkpoint, tmp_path / "plain", *options)
    with opened(bare, PlainDecoding()).executor() as executor:
        plain = [run_all(executor, [request])[0] for request in requests]
    texts = [
        [*request.input_token_ids[-32:], *output[0]]
        for request, output in zip(requests, plain, strict=True)
    ]
    heads = {"known": save_head(tmp_path / "known", fit_head(model, texts, 4096))}
    for recurrence in RECURRENCES:
        tensors = make_head(384, 4096, exit_dim=160, is_rnn=recurrence != "sum")
        heads[recurrence] = save_as(tmp_path / recurrence, recurrence, tensors)
    for name, beams in (*((name, 3) for name in heads), ("known", 1)):
        folder = build(checkpoint, tmp_path / f"engine-{name}-{beams}",
                       "--speculative-decoding-mode", "redrafter", "--draft-model-dir", heads[name],
                       "--redrafter-num-beams", beams, "--redrafter-draft-len-per-beam", 5,
                       *options)  # fmt: skip
        # Other beams than those of the engine's kernels are searched by the host.
        for method in (RecurrentDrafting(), RecurrentDrafting(beams), RecurrentDrafting(None, 2)):
            with opened(folder, method).executor() as executor:
                if name == "known":
                    assert [run_all(executor, [request])[0] for request in requests] == plain
                assert run_all(executor, requests) == plain, "all together"
                assert run_all(executor, requests) == plain, "with blocks that are reused"
                stats = executor.get_speculation_stats()
            assert stats.draft_tokens > 200
            if name == "known":
                assert stats.accepted_tokens > 200
                assert len(stats.accepted_at_position) == (method.length or 5), "whole beams"


@pytest.mark.parametrize("vocab_size", [131, 4096, 128256])
def test_the_likeliest_tokens_are_those_of_the_cpu(vocab_size: int) -> None:
    """Ties, zeros of both signs and values that are no numbers included."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn((40, vocab_size), generator=generator) * 8
    logits[1] = logits[1].round()
    logits[2] = 0.0
    logits[2, ::2] = -0.0
    logits[3, ::5] = torch.inf
    ids, log_probs = top_log_probs(logits.cuda(), 16)
    wanted, values = top_log_probs(logits, 16)
    assert torch.equal(ids.cpu(), wanted)
    torch.testing.assert_close(log_probs.cpu(), values, rtol=1e-5, atol=1e-5, equal_nan=True)
