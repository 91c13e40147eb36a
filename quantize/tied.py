"""Whether the output projection of a checkpoint is its embedding.

transformers ties the two only where a checkpoint that says so does not hold two different ones;
`build` and `quantize` ask here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmctl.quantize.checkpoint import Checkpoint

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_CHUNK_ROWS = 4096  # compared at a time: two chunks in memory, and an early end where they differ


def is_tied(checkpoint: Checkpoint, says_so: bool) -> bool:
    """Whether the embedding is the output projection, in a checkpoint whose config.json has
    `says_so` for tie_word_embeddings. Reads both tensors where it says so and holds both."""
    import torch

    if not says_so or not {EMBEDDING, HEAD} <= set(checkpoint.tensors):
        return says_so
    embedding, head = checkpoint.read(EMBEDDING), checkpoint.read(HEAD)
    if embedding.shape != head.shape:
        return False
    chunks = (slice(start, start + _CHUNK_ROWS) for start in range(0, len(head), _CHUNK_ROWS))
    return all(torch.equal(embedding[rows].float(), head[rows].float()) for rows in chunks)
