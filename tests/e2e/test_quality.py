"""The demo pair's text and probabilities against Hugging Face transformers and its own BF16."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from support.e2e import DRAFT_LEN, DemoPair, PromptMaker, run_all
from transformers import AutoModelForCausalLM, PreTrainedModel

from llmctl.runtime.request import Request
from scripts.demo.engine import engine_logits
from scripts.demo.evaluation import losses
from scripts.demo.tokenizer import BOS_ID

NUM_PROMPTS, NUM_TOKENS = 24, 48
WINDOW, NUM_WINDOWS = 256, 12  # perplexity: windows of held-out text, each from an empty cache


@pytest.fixture(scope="module")
def reference(demo: DemoPair) -> PreTrainedModel:
    """The demo target in transformers, float32; the end token is a token like any other."""
    path = demo.examples / "demo-target"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture(scope="module")
def written(prompts: PromptMaker, reference: PreTrainedModel) -> list[list[int]]:
    """What transformers writes behind every prompt, all of them in one batch."""
    rows = prompts(NUM_PROMPTS)
    width = max(map(len, rows))
    missing = [width - len(row) for row in rows]
    out = reference.generate(
        input_ids=torch.tensor([[0] * n + [*row] for n, row in zip(missing, rows, strict=True)]),
        attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in missing]),
        do_sample=False,
        max_new_tokens=NUM_TOKENS,
    )
    return [row[width:].tolist() for row in out]


@torch.inference_mode()
def gap(model: PreTrainedModel, context: list[int], a: int, b: int) -> float:
    """How far apart transformers' logits of two candidate tokens are, after `context`."""
    logits = model(input_ids=torch.tensor([context])).logits[0, -1]
    return abs(float(logits[a] - logits[b]))


@pytest.mark.parametrize(
    # A tie is a divergence where transformers' own two logits are closer than the dtype resolves:
    # logits are up to about 30 in size, float32 keeps 2e-6 of that, bfloat16 0.1.
    ("engine", "tie", "most_ties"),
    [("whole-float32", 1e-4, 1), ("whole-bfloat16", 0.15, 8)],
)
def test_greedy_text_equals_transformers(
    demo: DemoPair,
    prompts: PromptMaker,
    reference: PreTrainedModel,
    written: list[list[int]],
    engine: str,
    tie: float,
    most_ties: int,
) -> None:
    chosen = prompts(NUM_PROMPTS)
    with demo.executor(engine) as executor:
        outputs = run_all(executor, [Request(prompt, NUM_TOKENS) for prompt in chosen])
    num_ties = 0
    for prompt, (ours,), theirs in zip(chosen, outputs, written, strict=True):
        different = [i for i in range(NUM_TOKENS) if ours[i] != theirs[i]]
        if different:
            first = different[0]
            context = [*prompt, *theirs[:first]]
            assert gap(reference, context, ours[first], theirs[first]) < tie, (prompt, first)
            num_ties += 1
    assert num_ties <= most_ties


def test_fp8_perplexity_is_within_one_percent_of_bfloat16(
    demo: DemoPair, held_out_ids: list[int]
) -> None:
    starts = np.linspace(0, len(held_out_ids) - WINDOW, NUM_WINDOWS).astype(int)
    rows = [[BOS_ID, *held_out_ids[start : start + WINDOW]] for start in starts]

    def perplexity(engine: str) -> float:
        total, count = losses(engine_logits(demo.engine(engine)), rows, torch.device("cpu"))
        return math.exp(total / count)

    bfloat16, fp8 = perplexity("whole-bfloat16"), perplexity("whole-fp8")
    print(f"held-out perplexity: bfloat16 {bfloat16:.4f}, fp8 {fp8:.4f}")
    assert 1.5 < bfloat16 < 20  # a model that learned something, measured without leaks
    assert abs(fp8 / bfloat16 - 1) < 0.01


def test_the_fp8_draft_is_accepted_often_enough(demo: DemoPair, held_out_ids: list[int]) -> None:
    starts = np.linspace(0, len(held_out_ids) - 128, 64).astype(int)
    long = [tuple(held_out_ids[start : start + 128]) for start in starts]
    with demo.executor("whole-fp8", "draft-fp8") as executor:
        run_all(executor, [Request(prompt, 64) for prompt in long])
        stats = executor.get_speculation_stats()
    print(f"acceptance {stats.acceptance_rate:.3f}, {stats.acceptance_length:.2f} tokens a round")
    assert stats.draft_tokens <= DRAFT_LEN * stats.rounds
    assert stats.acceptance_rate >= 0.55
