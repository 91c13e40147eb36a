"""Where an engine's weights are in its memory on a device: one allocation for all of them."""

from __future__ import annotations

from llmctl.builder.engine_format import Plan, weight_sizes

WEIGHT_ALIGNMENT = 256  # bytes: what cudaMalloc gives, and two L2 cache lines


def weight_places(plan: Plan) -> tuple[dict[str, tuple[int, int]], int]:
    """(the bytes [begin, end) of each weight, the bytes of all)."""
    places, offset = {}, 0
    for name, num_bytes in weight_sizes(plan).items():
        places[name] = offset, offset + num_bytes
        offset += -(-num_bytes // WEIGHT_ALIGNMENT) * WEIGHT_ALIGNMENT
    return places, offset


def allocated_bytes(plan: Plan) -> int:
    """Device memory that the weights of a plan take."""
    return weight_places(plan)[1]
