"""The likeliest tokens of rows of logits, in plain torch, on whatever device the logits are.

Sums are float32: at -8 bfloat16 has steps of 1/32, and beams would tie. Where logits tie, the
smaller id comes first, so that a beam search has one result.
"""

from __future__ import annotations

import torch


def top_log_probs(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, log-probabilities) [rows, count] of the largest of float32 logits [rows, vocab_size],
    the largest first: int64 and float32."""
    vocab_size = logits.shape[1]
    normalizer = logits.logsumexp(1, keepdim=True)
    largest = logits.topk(min(count + 1, vocab_size))
    if bool((largest.values[:, :-1] > largest.values[:, 1:]).all()):  # nothing ties
        return largest.indices[:, :count], largest.values[:, :count] - normalizer
    # One integer a logit that orders as (logit, -id): float32 bits are in order but for the sign.
    bits = (logits + 0.0).view(torch.int32).to(torch.int64)  # no -0.0, which ties with 0.0
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ids = torch.arange(vocab_size, device=logits.device)
    keys = (ordered << 32) | (vocab_size - 1 - ids)
    found = vocab_size - 1 - (keys.topk(count).values & 0xFFFFFFFF)
    return found, logits.gather(1, found) - normalizer
