"""The ranks of a tensor-parallel engine compute together what one engine computes."""

from __future__ import annotations

import numpy as np
import pytest
from support.tensorrt.checkpoints import FAMILIES, write_checkpoint
from support.tensorrt.contiguous import LinearCache
from support.tensorrt.evaluated import Ranks, bind_reference, make_step

# ||difference|| / ||logits||. Partial sums are rounded before they are added up, and a rank scales
# its own part of a token, which moves values over FP8's borders; in float32 only the order of sums
# differs. Measured: float32 9e-7, bfloat16 1.2e-2, fp8 6.2e-2, fp8 per token 6.4e-2.
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2, "fp8": 0.12, "fp8 per token": 0.12}


def errors_of(ranks: Ranks, reference, steps) -> list[float]:
    found = []
    for _, requests in steps:
        step = make_step(requests)
        shown, wanted = ranks.logits(step), reference.logits(step)
        assert all(np.array_equal(shown[0], other) for other in shown[1:]), "ranks disagree"
        if step.num_rows:
            found.append(float(np.linalg.norm(shown[0] - wanted) / np.linalg.norm(wanted)))
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_in_float32_agree_closely(family, float32_networks, steps, tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", family, "bfloat16")
    options = {"dtype": "float32"}
    reference = bind_reference(checkpoint, **options)
    errors = errors_of(Ranks(checkpoint, 2, **options), reference, steps)
    assert max(errors) <= TOLERANCE["float32"], errors


@pytest.mark.parametrize("form", ["bfloat16", "fp8", "fp8 per token"])
@pytest.mark.parametrize(("num_ranks", "kv_heads"), [(2, 4), (4, 4), (4, 2)])
def test_ranks_in_every_form_agree_with_the_reference(
    num_ranks, kv_heads, form, steps, tmp_path
) -> None:
    fields = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "intermediate_size": 128}
    checkpoint = write_checkpoint(tmp_path / "c", "llama tied, biased", form, **fields)
    errors = errors_of(Ranks(checkpoint, num_ranks), bind_reference(checkpoint), steps)
    assert max(errors) <= TOLERANCE[form], errors


def test_a_rank_alone_computes_something_else(float32_networks, steps, tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16")
    ranks = Ranks(checkpoint, 2, dtype="float32")
    ranks.ranks[1].tensors["model.layers.0.self_attn.o_proj.weight"].zero_()
    errors = errors_of(ranks, bind_reference(checkpoint, dtype="float32"), steps)
    assert min(errors) > 100 * TOLERANCE["float32"]


def test_ranks_hold_their_share_of_the_heads(tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16", intermediate_size=128)
    whole, half = LinearCache(checkpoint), LinearCache(checkpoint, tp_size=2)
    assert whole.caches["cache_k_0"].shape[1] == 2 * half.caches["cache_k_0"].shape[1] == 2
