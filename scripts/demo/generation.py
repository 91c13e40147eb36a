"""Text that the target writes itself: what the draft will have to predict."""

from __future__ import annotations

import numpy as np
import torch

from scripts.demo.batches import TokenStream, with_bos
from scripts.demo.model import Llama
from scripts.demo.training import autocast

PROMPT_LENGTHS = (64, 128, 192)
TEMPERATURES = (0.0, 0.0, 0.8)
"""One batch in three is sampled: greedy text alone repeats itself and covers little."""


def continue_corpus(
    target: Llama, stream: TokenStream, num_batches: int, batch: int, length: int, seed: int
) -> TokenStream:
    """Rows [num_batches * batch, length], each a prompt cut from the corpus and its continuation.

    Rows come without the leading `<s>`; `length` counts the prompt.
    """
    random = np.random.default_rng(seed)
    parts: list[TokenStream] = []
    for index in range(num_batches):
        prompt_length = min(PROMPT_LENGTHS[index % 3], length // 2)
        temperature = TEMPERATURES[(index // 3) % 3]
        parts.append(
            continue_prompts(target, stream, random, batch, prompt_length, length, temperature)
        )
    return np.concatenate(parts)


@torch.no_grad()
def continue_prompts(
    target: Llama,
    stream: TokenStream,
    random: np.random.Generator,
    batch: int,
    prompt_length: int,
    length: int,
    temperature: float,
) -> TokenStream:
    """Rows [batch, length]: prompts of one length from random places, and what target adds."""
    device = target.model.norm.weight.device
    starts = random.integers(len(stream) - prompt_length, size=batch)
    prompts = np.stack([stream[start : start + prompt_length] for start in starts])
    prompt = with_bos(torch.from_numpy(prompts)).to(device)
    target.eval()
    with autocast(device):
        written = generate(target, prompt, length - prompt_length, temperature)
    return np.concatenate([prompts, written.cpu().numpy().astype(np.int32)], axis=1)


@torch.no_grad()
def generate(
    model: Llama, prompt: torch.Tensor, num_tokens: int, temperature: float
) -> torch.Tensor:
    """Continue prompt [batch, n] by num_tokens; temperature 0 is greedy. Nothing stops a row:
    after `</s>` comes the next document, as in training."""
    is_cuda = prompt.device.type == "cuda"
    batch, prompt_length = prompt.shape
    dtype = torch.bfloat16 if is_cuda else torch.float32
    cache = model.new_cache(batch, prompt_length + num_tokens, dtype)
    written: list[torch.Tensor] = []
    ids, start = prompt, 0
    for _ in range(num_tokens):
        logits = model(ids, cache, start)[:, -1].float()
        start += ids.shape[1]
        if temperature > 0:
            ids = torch.multinomial((logits / temperature).softmax(-1), 1)
        else:
            ids = logits.argmax(-1, keepdim=True)
        written.append(ids)
    return torch.cat(written, dim=1)
