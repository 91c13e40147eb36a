"""The pieces of every family compute what the reference backend computes.

TensorRT's networks round where the references round, so what is left is another order of sums and,
in FP8, values that fall to the other side of a rounding boundary because of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.tensorrt.checkpoints import FAMILIES, FORMS, VOCAB, write_checkpoint
from support.tensorrt.evaluated import (
    Bound,
    Request,
    Steps,
    bind_evaluated,
    bind_reference,
    make_step,
)
from support.tensorrt.fake_machine import pretend_gpu

from llmctl.plugins.backends.tensorrt import packages
from llmctl.runtime.step import pack_trees

trt = pytest.importorskip("tensorrt_rtx", reason="the networks are TensorRT's")

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


def test_profiles_change_plans_and_not_what_they_compute(steps, tmp_path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8")
    found, _ = bind_evaluated(checkpoint, plugins={"multiple_profiles": "disable"})
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


def test_products_given_to_our_kernels_leave_pieces_that_fit_them(
    steps, tmp_path, monkeypatch
) -> None:
    """--gemm_plugin fp8, on a GPU that our GEMMs run on: the network is cut at every linear."""
    pretend_gpu(monkeypatch, (9, 0), "NVIDIA H200")
    monkeypatch.setattr(packages, "import_module", lambda name: trt)
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "fp8")
    plugins = {"gemm_plugin": "fp8"}
    found, networks = bind_evaluated(checkpoint, "tensorrt", plugins=plugins)
    assert len(networks) > 3
    errors = worst(found, bind_reference(checkpoint), steps)
    assert max(errors.values()) <= TOLERANCE["fp8"], errors


PARENTS = (-1, 0, -1, 2)  # two branches of two tokens below the root
BRANCHES = ([0, 1, 2], [0, 3, 4])


@pytest.mark.parametrize("form", ["float16", "fp8"])
def test_branches_of_trees_get_the_logits_of_plain_chains(form, tmp_path) -> None:
    """Pieces know nothing of trees: positions and paths are our kernels'."""
    checkpoint = write_checkpoint(tmp_path / "c", "llama", form)
    rng = np.random.default_rng(6)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (9, 17)]
    trees = [rng.integers(0, VOCAB, 5).tolist() for _ in prompts]
    start = [Request((3 * i, 3 * i + 1), 0, p, 1) for i, p in enumerate(prompts)]
    chains = []
    for branch in BRANCHES:
        reference = bind_reference(checkpoint)
        reference.logits(make_step(start))
        pairs = zip(start, trees, strict=True)
        step = make_step([r.then([tree[node] for node in branch], 3) for r, tree in pairs])
        chains.append(reference.logits(step).reshape(2, 3, VOCAB))
    found, _ = bind_evaluated(checkpoint)
    found.logits(make_step(start))
    step = make_step([r.then(tree, 5) for r, tree in zip(start, trees, strict=True)])
    step.trees = pack_trees([PARENTS] * len(start), step.cu_q, step.position_ids)
    logits = found.logits(step).reshape(2, 5, VOCAB)
    for branch, wanted in zip(BRANCHES, chains, strict=True):
        error = np.abs(logits[:, branch] - wanted).max() / np.abs(wanted).max()
        assert error <= TOLERANCE[form]
