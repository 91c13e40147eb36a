"""The numbers of the model card: perplexity, agreement of argmaxes, greedy acceptance.

Models are functions from ids [batch, length] (int64) to logits [batch, length, vocab], so that the
same protocol measures our training model, a Hugging Face model or a quantized one. Rows are padded
on the right, which causal attention never sees.
"""

from __future__ import annotations

import ast
import hashlib
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from scripts.demo.corpus import Document
from scripts.demo.tokenizer import BOS_ID, EOS_ID, PAD_ID

Logits = Callable[[Tensor], Tensor]

WINDOW = 1024
"""Tokens per perplexity window, `<s>` not counted; windows don't overlap."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Greedy draft-target decoding over prompts, added up.

    `acceptance` is strict: accepted draft tokens over proposed ones, the proposals behind a
    rejected one included. `per_position[i]` is conditional: how often draft token i is accepted
    when those before it were.
    """

    draft_len: int
    num_prompts: int
    num_rounds: int
    acceptance: float
    tokens_per_round: float
    per_position: list[float]

    def to_json(self) -> dict[str, object]:
        return asdict(self)


def windows(
    tokenizer: Tokenizer, documents: list[Document], length: int = WINDOW
) -> tuple[list[list[int]], int]:
    """Documents cut into windows of `length` tokens, each behind `<s>`; and their size in bytes.

    The last window of a document is shorter and ends with `</s>`. Every token but `<s>` is
    predicted and counted.
    """
    rows: list[list[int]] = []
    for document in documents:
        ids = [*tokenizer.encode(document.text, add_special_tokens=False).ids, EOS_ID]
        rows += [[BOS_ID, *ids[at : at + length]] for at in range(0, len(ids), length)]
    return rows, sum(len(document.text.encode()) for document in documents)


@torch.no_grad()
def losses(
    model: Logits, rows: list[list[int]], device: torch.device, batch: int = 8
) -> tuple[float, int]:
    """Summed negative log-likelihood in nats of all tokens behind `<s>`, and their number."""
    total, num_tokens = 0.0, 0
    for ids, labels in _padded(rows, device, batch):
        logits = model(ids).float()
        total += F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
        ).item()
        num_tokens += int((labels != -100).sum())
    return total, num_tokens


def perplexity(
    model: Logits, tokenizer: Tokenizer, documents: list[Document], device: torch.device
) -> dict[str, float]:
    """Perplexity per token and bits per byte of text."""
    rows, num_bytes = windows(tokenizer, documents)
    total, num_tokens = losses(model, rows, device)
    return {
        "perplexity": math.exp(total / num_tokens),
        "bits_per_byte": total / math.log(2) / num_bytes,
        "num_tokens": num_tokens,
    }


@torch.no_grad()
def agreement(
    target: Logits, draft: Logits, rows: list[list[int]], device: torch.device, batch: int = 8
) -> float:
    """Share of positions of held-out text where both models' most likely tokens are equal."""
    equal, num_tokens = 0, 0
    for ids, labels in _padded(rows, device, batch):
        counted = labels != -100
        same = target(ids).argmax(-1) == draft(ids).argmax(-1)
        equal += int((same & counted).sum())
        num_tokens += int(counted.sum())
    return equal / num_tokens


def function_prompts(
    tokenizer: Tokenizer, documents: list[Document], length: int, num_prompts: int
) -> list[list[int]]:
    """Prompts of `length` tokens, `<s>` included, that end at a line inside a function's body.

    One candidate for each function of 8 lines or more, cut after a third of it; the order is that
    of a hash of the place, so the prompts cross the documents.
    """
    candidates: list[tuple[bytes, list[int]]] = []
    for document in documents:
        try:
            tree = ast.parse(document.text)
        except (SyntaxError, ValueError):  # topics are prose, test data may be broken on purpose
            continue
        lines = document.text.splitlines(keepends=True)
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            first, last = node.body[0].lineno, node.end_lineno or 0
            if last - node.lineno < 8:
                continue
            cut = min(last - 1, first + (last - first) // 3)
            text = "".join(lines[:cut]).rstrip("\n")
            ids = tokenizer.encode(text[-8 * length :], add_special_tokens=False).ids
            if len(ids) >= length:
                place = hashlib.sha256(f"{document.name}:{cut}".encode()).digest()
                candidates.append((place, [BOS_ID, *ids[1 - length :]]))
    return [prompt for _, prompt in sorted(candidates)][:num_prompts]


@torch.no_grad()
def greedy_acceptance(
    target: Logits,
    draft: Logits,
    prompts: list[list[int]],
    device: torch.device,
    draft_len: int = 4,
    num_tokens: int = 128,
) -> Acceptance:
    """Decode all prompts (of one length) by draft and target, greedily, and count.

    A round: the draft proposes `draft_len` tokens, one forward pass each; one pass of the target
    gives its own choice at each of the `draft_len + 1` positions; proposals are accepted up to the
    first that differs, and the target's choice there is emitted too. A row ends after the round
    that reaches `num_tokens` or emits `</s>`; that last round counts whole.
    """
    num_prompts, prompt_length = len(prompts), len(prompts[0])
    capacity = prompt_length + num_tokens + 2 * (draft_len + 1)
    ids = torch.full((num_prompts, capacity), PAD_ID, dtype=torch.int64, device=device)
    ids[:, :prompt_length] = torch.tensor(prompts, device=device)
    lengths = torch.full((num_prompts,), prompt_length, device=device)
    reached = torch.zeros(draft_len + 1, dtype=torch.int64)  # rounds with at least i accepted
    steps = torch.arange(draft_len + 1, device=device)
    num_emitted = 0
    while len(ids):
        rows = torch.arange(len(ids), device=device)
        for step in range(draft_len):
            used = int(lengths.max()) + step
            logits = draft(ids[:, :used])
            ids[rows, lengths + step] = logits[rows, lengths + step - 1].argmax(-1)
        logits = target(ids[:, : int(lengths.max()) + draft_len])
        choices = logits[rows[:, None], lengths[:, None] - 1 + steps].argmax(-1)
        proposed = ids[rows[:, None], lengths[:, None] + steps[:-1]]
        accepted = (proposed == choices[:, :-1]).long().cumprod(1).sum(1)
        reached += (accepted[:, None] >= steps).sum(0).cpu()
        num_emitted += int((accepted + 1).sum())
        # Up to the first difference the choices equal the proposals, so writing all is right.
        ids[rows[:, None], lengths[:, None] + steps] = choices
        lengths = lengths + accepted + 1
        has_ended = ((choices == EOS_ID) & (steps <= accepted[:, None])).any(1)
        active = (lengths < prompt_length + num_tokens) & ~has_ended
        ids, lengths = ids[active], lengths[active]
    num_rounds = int(reached[0])
    counts = reached.tolist()
    return Acceptance(
        draft_len=draft_len,
        num_prompts=num_prompts,
        num_rounds=num_rounds,
        acceptance=sum(counts[1:]) / (num_rounds * draft_len),
        tokens_per_round=num_emitted / num_rounds,
        per_position=[counts[i + 1] / max(1, counts[i]) for i in range(draft_len)],
    )


def find_repeats(rows: Tensor, repeat_length: int = 10) -> Tensor:
    """Where, in rows [batch, n], the last `repeat_length` tokens stood earlier in the row."""
    equal = rows[:, :, None] == rows[:, None, :]
    run = equal.clone()
    for back in range(1, repeat_length):
        run[:, back:, back:] &= equal[:, :-back, :-back]
        run[:, :back] = False
        run[:, :, :back] = False
    return run.tril(-1).any(-1)


def _padded(rows: list[list[int]], device: torch.device, batch: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and labels [batch, longest row - 1]; labels are -100 behind a row's end."""
    pairs: list[tuple[Tensor, Tensor]] = []
    rows = sorted(rows, key=len)
    for first in range(0, len(rows), batch):
        group = rows[first : first + batch]
        longest = max(map(len, group)) - 1
        ids = torch.full((len(group), longest), PAD_ID, dtype=torch.int64)
        labels = torch.full((len(group), longest), -100, dtype=torch.int64)
        for index, row in enumerate(group):
            ids[index, : len(row) - 1] = torch.tensor(row[:-1])
            labels[index, : len(row) - 1] = torch.tensor(row[1:])
        pairs.append((ids.to(device), labels.to(device)))
    return pairs
