"""What a ReDrafter head is called in an engine, and its sizes. Imports nothing: the runtime, too,
reads this (through engine_format.py)."""

from __future__ import annotations

FIRST, NEXT = "redrafter.first", "redrafter.next"  # its graphs (network.py)
MODULE = "drafter"  # that the head is in, in an engine as in TensorRT-LLM's checkpoints
STATES = CONTEXT, CARRY = "context", "carry"  # what a step hands to the next one
RECURRENCES = {  # of the state s behind an embedding e, as people read it
    "silu": "s = SiLU(W e + U s + b)",
    "linear": "s = W e + U s + b, first s = W e",
    "sum": "s = s + e",
}
DEFAULT_BEAMS = DEFAULT_LENGTH = 5  # TensorRT-LLM's
MOST_BEAMS = 64
MOST_DRAFTS = 1024  # beams times their length: nodes of the tree that the target verifies
