"""The layouts of published Medusa heads: what each is built to, against plain torch modules."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from support.medusa import Tensors, make_heads, save_heads, torch_heads
from torch.nn.functional import linear

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine, read_engine_config
from llmctl.builder.heads.medusa.checkpoint import open_heads
from llmctl.errors import MissingTensor, PairMismatch, UnexpectedTensor, Unsupported
from llmctl.plugins.core.calls import StepInputs
from llmctl.plugins.core.reference import ReferenceProgram
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.runtime.engines.engine import bind_plan, kv_cache_shape, open_cpu_engine
from llmctl.runtime.engines.heads import bind_heads
from llmctl.runtime.step import pack_rows

HIDDEN, VOCAB, HEADS = 64, 131, 3
TARGET = Checkpoint(Path("target"), {}, {}, None)
MEDUSA = {"speculative_decoding_mode": "medusa", "max_batch_size": 4, "dtype": "bfloat16"}


def without_outputs(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if "linear" in name}


def as_vllm_has_it(tensors: Tensors, *, output: str, has_bias: bool, prefix: str = "") -> Tensors:
    """The names of vllm/model_executor/models/medusa.py."""
    found = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        if rest[0] == "linear" and (has_bias or rest[1] == "weight"):
            found[f"{prefix}blocks.{head}.layers.{layer}.{rest[1]}"] = tensor
        elif rest[0] == "weight" and output == "own":
            found[f"{prefix}lm_heads.{head}.weight"] = tensor
        elif rest[0] == "weight" and head == "0":
            found[f"{prefix}{output}"] = tensor
    return found


def save_vllm(folder: Path, tensors: Tensors, **config: object) -> Path:
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors")
    fields = {"model_type": "medusa", "num_heads": HEADS, "medusa_fc_bias": False, **config}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def plain(tensors: Tensors, *, output: torch.Tensor | None, has_bias: bool) -> torch.nn.ModuleList:
    """Torch modules of the same heads, with another output matrix, and zeros for biases."""
    changed = dict(tensors)
    for name in tensors:
        if output is not None and "linear" not in name:
            changed[name] = output.float()
        if not has_bias and name.endswith("bias"):
            changed[name] = torch.zeros_like(tensors[name])
    return torch_heads(changed).bfloat16()


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "layout", ["shared with the target", "vllm", "vllm, biased", "vllm, common", "vllm, original"]
)
def test_every_layout_computes_what_its_modules_do(
    tmp_path: Path, new_model, save, layout: str, tied: bool, backend: str
) -> None:
    model = new_model("llama", head_dim=64, tie_word_embeddings=tied)
    target, tensors = save(model), make_heads(HEADS, 2, HIDDEN, VOCAB)
    has_bias, output = layout in ("shared with the target", "vllm, biased"), None
    if layout == "shared with the target":
        folder = save_heads(tmp_path / "heads", without_outputs(tensors), '{"version": "2"}')
        output = model.get_output_embeddings().weight.detach().bfloat16()
    else:
        place = {"vllm, common": "lm_head.weight", "vllm, original": "lm_heads.0.weight"}
        stored = as_vllm_has_it(
            tensors,
            output=place.get(layout, "own"),
            has_bias=has_bias,
            prefix="medusa_heads." if layout == "vllm, biased" else "",
        )
        folder = save_vllm(tmp_path / "heads", stored, original_lm_head=layout == "vllm, original")
        output = tensors["0.2.weight"] if layout in place else None
    request = BuildRequest(**MEDUSA, draft_model_dir=str(folder))
    engine = plan_build(target, request, backend=backend, with_binaries=False)
    wanted = plain(tensors, output=output, has_bias=has_bias)
    hidden = torch.randn((9, HIDDEN), generator=torch.Generator().manual_seed(1)).bfloat16()
    found = heads_on(engine, hidden, [8, 2])
    for head, module in enumerate(wanted):
        with torch.no_grad():
            logits = module(hidden[[8, 2]]).float()
        torch.testing.assert_close(found[f"logits.{head}"], logits, rtol=0.04, atol=0.04)


def heads_on(engine, hidden: torch.Tensor, rows: list[int]) -> dict[str, torch.Tensor]:
    """The heads of a plan, run by the references of its operators."""
    weights = {
        tensor.name: torch.cat(list(engine.sources[tensor.name].chunks(engine.checkpoint)))
        for tensor in engine.plan.tensors
        if tensor.kind == "weight"
    }
    arena = torch.zeros(engine.plan.arena_bytes, dtype=torch.uint8)
    tensors = bind_plan(engine.plan, weights, arena)
    tensors[engine.plan.outputs["hidden"]][: len(hidden)] = hidden
    (head,) = bind_heads(engine.plan, tensors)
    cache = torch.zeros(kv_cache_shape(engine.plan, 2), dtype=torch.bfloat16)
    step = pack_rows(len(hidden), rows)
    ReferenceProgram(head.calls, head.row_inputs).run(step, cache)
    return head.outputs(step)


@pytest.mark.parametrize("tied", [False, True])
def test_the_targets_output_projection_is_stored_once(tmp_path: Path, new_model, save, tied):
    model = new_model("llama", head_dim=64, tie_word_embeddings=tied)
    tensors = without_outputs(make_heads(HEADS, 1, HIDDEN, VOCAB))
    folder = save_heads(tmp_path / "heads", tensors)
    request = BuildRequest(**MEDUSA, draft_model_dir=str(folder))
    target = save(model)
    run_build(plan_build(target, request, backend="cpu"), tmp_path / "engine")
    weights = open_engine(tmp_path / "engine")[1]
    found = {name for name in weights if weights[name].shape[0] == VOCAB}
    assert found == {"model.embed_tokens.weight", *(() if tied else ("lm_head.weight",))}
    facts = read_engine_config(tmp_path / "engine").build_config["draft_heads"]
    assert (facts["output"], facts["has_bias"]) == ("target", True)


def test_untrained_heads_that_share_the_projection_say_what_the_target_says(
    tmp_path: Path, new_model, save
) -> None:
    """Through the compiled kernels: with weights of zero a block passes its input on."""
    tensors = {n: torch.zeros_like(t) for n, t in make_heads(1, 1, HIDDEN, VOCAB).items()}
    folder = save_heads(tmp_path / "heads", without_outputs(tensors))
    request = BuildRequest(**MEDUSA, draft_model_dir=str(folder))
    target = save(new_model("llama", head_dim=64))
    run_build(plan_build(target, request, backend="cpu"), tmp_path / "engine")
    engine = open_cpu_engine(tmp_path / "engine")
    engine.allocate_kv_cache(2)
    count = np.arange(4, dtype=np.int32)
    engine.run(
        StepInputs(
            token_ids=np.array([3, 1, 4, 1], np.int32),
            position_ids=count,
            cu_q=np.array([0, 4], np.int32),
            kv_len=np.array([4], np.int32),
            block_tables=np.zeros((1, 1), np.int32),
            slot_mapping=count,
            logit_rows=count,
        )
    )
    logits = engine.output("logits")[:4].clone()
    found = engine.run_head("medusa", pack_rows(engine.max_num_rows, [3, 0]))
    assert torch.equal(found["logits.0"], logits[[3, 0]])


@pytest.mark.parametrize(
    ("change", "error", "found"),
    [
        (lambda t: t.update(token_map=torch.arange(9)), Unsupported, "token_map"),
        (lambda t: t.update({"norm.weight": torch.ones(3)}), UnexpectedTensor, "norm.weight"),
        (lambda t: t.update({"lm_head.weight": torch.ones(3)}), UnexpectedTensor, "beside output"),
        (lambda t: t.pop("lm_heads.1.weight"), MissingTensor, "1.1.weight"),
        (lambda t: t.pop("blocks.2.layers.0.weight"), MissingTensor, "2.0.linear.weight"),
    ],
)
def test_vllm_heads_that_are_not_whole_are_refused(tmp_path: Path, change, error, found) -> None:
    tensors = as_vllm_has_it(make_heads(HEADS, 1, HIDDEN, VOCAB), output="own", has_bias=False)
    change(tensors)
    with pytest.raises(error, match=found):
        open_heads(save_vllm(tmp_path / "heads", tensors), TARGET)


def test_heads_without_output_matrices_fit_any_vocabulary_of_their_hidden_size(
    tmp_path: Path, new_model, save
) -> None:
    folder = save_heads(tmp_path / "h", without_outputs(make_heads(HEADS, 1, 32, VOCAB)))
    heads = open_heads(folder, TARGET)
    assert (heads.hidden_size, heads.vocab_size) == (32, None)
    request = BuildRequest(**MEDUSA, draft_model_dir=str(folder))
    with pytest.raises(PairMismatch, match="hidden_size 32, the target has 64"):
        plan_build(save(new_model("llama", head_dim=64)), request, backend="cpu")


def test_the_modules_of_the_test_are_those_of_the_papers_formula() -> None:
    """The oracle against the formula, so that it is not only our reading of a layout."""
    tensors = make_heads(1, 1, HIDDEN, VOCAB)
    x = torch.randn((2, HIDDEN), generator=torch.Generator().manual_seed(2))
    block = linear(x, tensors["0.0.linear.weight"], tensors["0.0.linear.bias"])
    wanted = linear(x + block * block.sigmoid(), tensors["0.1.weight"])
    torch.testing.assert_close(torch_heads(tensors)[0](x), wanted)
