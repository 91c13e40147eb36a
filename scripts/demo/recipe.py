"""Every number of a training run: the committed models' recipe, and toy sizes for tests."""

from __future__ import annotations

from dataclasses import dataclass

from scripts.demo.model import Shape
from scripts.demo.training import Schedule


@dataclass(frozen=True, slots=True)
class Recipe:
    """Models, schedules and amounts of text."""

    target: Shape
    draft: Shape
    dropout: float
    batch: int
    """Rows in one step."""
    length: int
    """Tokens in a row."""
    target_schedule: Schedule
    draft_schedule: Schedule
    draft_corpus_steps: int
    """Steps of distillation on the corpus alone, before generated text joins."""
    generated_batches: int
    generated_rows: int
    generated_length: int
    validation_rows: int
    prompt_length: int
    num_prompts: int
    num_tokens: int


def shape(vocab_size: int, hidden: int, inner: int, layers: int, heads: tuple[int, int],
          max_length: int = 2048) -> Shape:  # fmt: skip
    """Heads of 64, as many query and key/value heads as `heads` says."""
    return Shape(vocab_size, hidden, inner, layers, *heads, 64, max_length)


FULL = Recipe(
    target=shape(4096, 384, 896, 8, (6, 2)),
    draft=shape(4096, 128, 352, 3, (2, 1)),
    dropout=0.2,
    batch=32,
    length=2048,
    target_schedule=Schedule(
        num_steps=2500, learning_rate=2e-3, warmup_steps=150, weight_decay=0.3
    ),
    draft_schedule=Schedule(
        num_steps=4000, learning_rate=4e-3, warmup_steps=150, weight_decay=0.02
    ),
    draft_corpus_steps=1400,
    generated_batches=9,
    generated_rows=4096,
    generated_length=512,
    validation_rows=128,
    prompt_length=128,
    num_prompts=256,
    num_tokens=128,
)
SMOKE = Recipe(
    target=shape(320, 64, 96, 2, (2, 1)),
    draft=shape(320, 64, 64, 1, (1, 1)),
    dropout=0.1,
    batch=2,
    length=64,
    target_schedule=Schedule(num_steps=4, learning_rate=2e-3, warmup_steps=2),
    draft_schedule=Schedule(num_steps=4, learning_rate=4e-3, warmup_steps=2),
    draft_corpus_steps=2,
    generated_batches=3,
    generated_rows=2,
    generated_length=32,
    validation_rows=2,
    prompt_length=16,
    num_prompts=4,
    num_tokens=16,
)
