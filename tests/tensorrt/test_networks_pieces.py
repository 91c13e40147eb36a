"""The pieces of every family compute what the reference backend computes.

TensorRT's networks round where the references round, so what is left is another order of sums and,
in FP8, values that fall to the other side of a rounding boundary because of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, FORMS, VOCAB, write_checkpoint
from evaluated import Bound, Steps, bind_evaluated, bind_reference, make_step

# Largest |difference| of logits over largest |logit|. Measured over all families and steps:
# bfloat16 1.8e-2, float16 1.9e-3, fp8 3.7e-3, fp8 per token 2.9e-3.
TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3, "fp8": 6e-3, "fp8 per token": 6e-3}


def compare(found: Bound, wanted: Bound, steps: Steps) -> Iterator[tuple[str, float]]:
    """(step, relative error of its logits) of every step that has any."""
    for name, requests in steps:
        step = make_step(requests)
        logits, reference = found.logits(step), wanted.logits(step)
        assert logits.shape == reference.shape == (step.num_rows, VOCAB)
        if step.num_rows:
            yield name, float(np.abs(logits - reference).max() / np.abs(reference).max())


def worst(found: Bound, wanted: Bound, steps: Steps) -> dict[str, float]:
    return dict(compare(found, wanted, steps))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_agree_with_the_reference_backend(family, form, steps, tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, form)
    found, networks = bind_evaluated(checkpoint)
    assert list(networks) == ["first", "middle", "last"]
    wanted = bind_reference(checkpoint)
    errors = worst(found, wanted, steps)
    assert len(errors) == len(steps) - 1
    assert max(errors.values()) <= TOLERANCE[form], errors
    if form == "fp8":
        same = found.kv_cache.view(torch.uint8) == wanted.kv_cache.view(torch.uint8)
        assert same.float().mean() > 0.999


@pytest.mark.parametrize("layers", [1, 2])
def test_models_of_few_layers_have_no_middle_or_use_it_once(layers, steps, tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8", num_hidden_layers=layers)
    found, networks = bind_evaluated(checkpoint)
    assert list(networks) == ["first", "middle", "last"][:: 3 - layers]
    errors = worst(found, bind_reference(checkpoint), steps)
    assert max(errors.values()) <= TOLERANCE["fp8"], errors


@pytest.mark.parametrize(
    "plugins",
    [
        {"multiple_profiles": "disable"},
        {"use_fp8_context_fmha": "disable"},
    ],
    ids=lambda plugins: next(iter(plugins)),
)
def test_options_change_plans_and_not_what_they_compute(plugins, steps, tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8")
    found, _ = bind_evaluated(checkpoint, plugins=plugins)
    errors = worst(found, bind_reference(checkpoint), steps)
    assert max(errors.values()) <= TOLERANCE["fp8"], errors


def test_a_layer_bound_to_the_weights_of_another_does_not_pass(steps, tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8")
    found, _ = bind_evaluated(checkpoint)
    first, second = (f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1))
    kept = found.tensors[first].clone()
    found.tensors[first].copy_(found.tensors[second])
    found.tensors[second].copy_(kept)
    errors = worst(found, bind_reference(checkpoint), steps)
    assert min(errors.values()) > 10 * TOLERANCE["fp8"]


def test_what_no_step_wrote_is_never_read(steps, tmp_path) -> None:
    """The arena starts as NaN, and the profile's limits are larger than any step here."""
    checkpoint = write_checkpoint(tmp_path / "c", "qwen3", "fp8 per token")
    found, _ = bind_evaluated(checkpoint)
    for _, requests in steps:
        assert np.isfinite(found.logits(make_step(requests))).all()
