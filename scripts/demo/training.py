"""The training loops: language modelling for the target, distillation for the draft, heads."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scripts.demo.batches import TokenStream, with_bos
from scripts.demo.model import Llama

Validate = Callable[[Llama], float]
"""Mean loss in nats per token on held-out text."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long and how fast: warm-up, then a cosine to a fiftieth of the peak learning rate."""

    num_steps: int
    learning_rate: float
    warmup_steps: int
    weight_decay: float = 0.1
    max_grad_norm: float = 1.0

    def rate(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        done = (step - self.warmup_steps) / max(1, self.num_steps - self.warmup_steps)
        return self.learning_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def autocast(device: torch.device) -> AbstractContextManager[object]:
    """BF16 matrix products on a GPU, FP32 elsewhere."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")


def product_dtype(device: torch.device) -> torch.dtype:
    """Of heads' matrix products: BF16, but on a CPU without AVX-512, where FP32 is seven times as
    fast."""
    is_slow = device.type == "cpu" and "AVX512" not in torch.backends.cpu.get_cpu_capability()
    return torch.float32 if is_slow else torch.bfloat16


def mixed(device: torch.device) -> AbstractContextManager[object]:
    """Matrix products in `product_dtype`."""
    dtype = torch.bfloat16
    return torch.autocast(device.type, dtype, enabled=product_dtype(device) == dtype)


def train(
    model: Llama,
    batches: Iterator[Tensor],
    loss_of: Callable[[Tensor], Tensor],
    schedule: Schedule,
    validate: Validate,
    label: str,
) -> list[tuple[int, float]]:
    """Minimise `loss_of(rows)` over the schedule; returns ten validations (step, loss)."""
    device = model.model.norm.weight.device
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": schedule.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=schedule.learning_rate,
        betas=(0.9, 0.95),
        fused=device.type == "cuda",
    )
    history: list[tuple[int, float]] = []
    started = time.perf_counter()
    num_tokens = 0
    model.train()
    for step in range(schedule.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        rows = next(batches).to(device, non_blocking=True)
        with autocast(device):
            loss = loss_of(rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), schedule.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        num_tokens += rows.shape[0] * (rows.shape[1] - 1)
        is_due = (step + 1) * 10 // schedule.num_steps > step * 10 // schedule.num_steps
        if is_due or step in (0, 20):
            held_out = validate(model) if is_due else math.nan
            elapsed = time.perf_counter() - started
            print(
                f"{label} step {step + 1}/{schedule.num_steps} loss {loss.item():.4f} "
                f"held-out {held_out:.4f} {elapsed:.0f} s {num_tokens / elapsed / 1e3:.0f} ktok/s",
                flush=True,
            )
            if is_due:
                history.append((step + 1, held_out))
            model.train()
    return history


def fit(
    parameters: Iterable[Tensor],
    loss_of: Callable[[], Tensor],
    schedule: Schedule,
    device: torch.device,
    validate: Callable[[], tuple[list[float], str]],
) -> list[tuple[int, list[float]]]:
    """Minimise `loss_of()`, whose batches are its own; ten validations: (step, what it found).
    validate: what is kept of a validation, and a few words about the rest."""
    parameters = list(parameters)
    optimizer = torch.optim.AdamW(
        parameters,
        lr=0.0,
        betas=(0.9, 0.95),
        weight_decay=schedule.weight_decay,
        fused=device.type == "cuda",
    )
    history: list[tuple[int, list[float]]] = []
    began = time.perf_counter()
    for step in range(schedule.num_steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        with mixed(device):
            loss = loss_of()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(parameters, schedule.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) * 10 // schedule.num_steps > step * 10 // schedule.num_steps:
            found, words = validate()
            history.append((step + 1, found))
            print(
                f"step {step + 1}/{schedule.num_steps} loss {loss.item():.3f} held-out "
                f"{', '.join(f'{share:.3f}' for share in found)}{words} "
                f"{time.perf_counter() - began:.0f} s",
                flush=True,
            )
    return history


def lm_loss(model: Llama) -> Callable[[Tensor], Tensor]:
    """Cross-entropy of the next token; rows [batch, n + 1] hold inputs and labels."""
    cross_entropy = compiled(_cross_entropy, model)

    def loss_of(rows: Tensor) -> Tensor:
        return cross_entropy(model(rows[:, :-1].contiguous()), rows[:, 1:])

    return loss_of


def distillation_loss(draft: Llama, target: Llama) -> Callable[[Tensor], Tensor]:
    """KL(target || draft), plus a share of cross-entropy to the target's most likely token.

    Greedy acceptance asks for equal argmaxes, which the second term rewards directly.
    """
    divergence = compiled(_divergence, draft)

    def loss_of(rows: Tensor) -> Tensor:
        inputs = rows[:, :-1].contiguous()
        with torch.no_grad():
            wanted = target(inputs)
        return divergence(draft(inputs), wanted)

    return loss_of


def mix(
    corpus: Iterator[Tensor],
    generated: TokenStream,
    batch: int,
    corpus_only_steps: int,
    seed: int,
) -> Iterator[Tensor]:
    """Corpus rows for the first steps, then three batches of generated rows to one of corpus.

    `generated` is [rows, length] without the leading `<s>`.
    """
    random = torch.Generator().manual_seed(seed)
    rows = with_bos(torch.from_numpy(generated))
    for _ in range(corpus_only_steps):
        yield next(corpus)
    while True:
        order = torch.randperm(len(rows), generator=random)
        for index, first in enumerate(range(0, len(rows) - batch + 1, batch)):
            if index % 3 == 0:
                yield next(corpus)
            yield rows[order[first : first + batch]]


def compiled(
    function: Callable[[Tensor, Tensor], Tensor], model: Llama
) -> Callable[[Tensor, Tensor], Tensor]:
    """Compile where the model's layers are: fused, the logits are read once and never copied."""
    return torch.compile(function, dynamic=False) if model.is_compiled else function


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())


def _divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    log_draft = logits.float().log_softmax(-1)
    log_target = wanted.float().log_softmax(-1)
    kl = (log_target.exp() * (log_target - log_draft)).sum(-1).mean()
    hard = F.nll_loss(log_draft.flatten(0, 1), wanted.argmax(-1).flatten())
    return kl + 0.3 * hard
