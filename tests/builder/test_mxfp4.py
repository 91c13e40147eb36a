"""Engines of MXFP4 weights against ModelOpt's own reading of the checkpoint.

The oracle is Hugging Face's model of the unquantized checkpoint with the weight of every quantized
linear replaced by what ModelOpt dequantizes, its input rounded to FP8 with the stored scale, and
keys and values likewise where their cache is FP8.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.mxfp4 import (
    CASES,
    MAX_RELATIVE_L2,
    VOCAB,
    modelopt_weight,
    parts_of,
)
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llmctl.builder.build import plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine
from llmctl.cli.main import execute

# ---- the oracle ----


def round_to_fp8(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(x.dtype) * scale


def fp8_cache_attention(
    module: Any, query: Any, key: Any, value: Any, *rest: Any, **kw: Any
) -> Any:
    """Attention over keys and values that were rounded with the scales its module carries."""
    key, value = round_to_fp8(key, module.k_scale), round_to_fp8(value, module.v_scale)
    return sdpa_attention_forward(module, query, key, value, *rest, **kw)


AttentionInterface.register("fp8_cache", fp8_cache_attention)


def oracle(source: Path, quantized: Path) -> PreTrainedModel:
    """Hugging Face's model of `source` with the numbers of `quantized`."""
    stored = load_file(quantized / "model.safetensors")
    has_cache = any(name.endswith(".k_scale") for name in stored)
    attention = "fp8_cache" if has_cache else "sdpa"
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation=attention)
    for name, module in model.named_modules():
        scale = stored.get(f"{name}.input_scale")
        if scale is not None:
            module.weight.data.copy_(modelopt_weight(stored, name))
            module.register_forward_pre_hook(lambda _, x, s=scale: (round_to_fp8(x[0], s),))
        if has_cache and name.endswith("self_attn"):
            for key in "kv":
                setattr(module, f"{key}_scale", stored[f"{name}.{key}_proj.{key}_scale"])
    return model.eval()


def logits_of(model: PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens]), use_cache=False).logits[0]


def relative_l2(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


# ---- engines of the cpu ----


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers_with_modelopts_numbers(
    case: str, program_name: str, mxfp4_checkpoints, build_engine, open_test_engine, some_tokens
) -> None:
    tokens = some_tokens(40, VOCAB)
    source, quantized = mxfp4_checkpoints("source"), mxfp4_checkpoints(case)
    wanted = logits_of(oracle(source, quantized), tokens)
    engine = open_test_engine(build_engine(quantized), program_name)
    assert (engine.plan.ops[-1].tactic == "cpu.linear.fp8") == ("head" in case)
    cache = "float8_e4m3fn" if "cache" in case else "float32"
    assert engine.plan.kv_cache.dtype == cache
    found = engine.run(tokens)
    assert relative_l2(found, wanted) < MAX_RELATIVE_L2
    plain = AutoModelForCausalLM.from_pretrained(source)
    assert relative_l2(found, logits_of(plain, tokens)) > 5 * MAX_RELATIVE_L2  # 4-bit weights show


def test_weights_are_stored_as_fp8_that_are_modelopts_numbers(
    mxfp4_checkpoints, build_engine
) -> None:
    stored = load_file(mxfp4_checkpoints("head") / "model.safetensors")
    plan, weights = open_engine(build_engine(mxfp4_checkpoints("head")))
    checked = 0
    for op in plan.ops:
        if op.op != "linear":
            continue
        weight = weights[op.inputs["weight"]]
        assert weight.dtype == torch.float8_e4m3fn
        scale = weights[op.inputs["weight_scale"]]
        wanted = torch.cat([modelopt_weight(stored, module) for module in parts_of(op.name)])
        assert torch.equal(weight.float() * scale[:, None], wanted), op.name
        checked += 1
    assert checked == 2 * 4 + 1


@pytest.fixture(scope="module")
def pair(
    mxfp4_checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with engines: a target of MXFP4, and a draft with another head and cache."""
    folder = tmp_path_factory.mktemp("pair")
    for role, case in (("target", "plain"), ("draft", "head, fp8 cache")):
        request = BuildRequest(max_batch_size=8, max_draft_len=4 if role == "target" else 0)
        run_build(plan_build(mxfp4_checkpoints(case), request, backend="cpu"), folder / role)
    return folder


def test_greedy_text_with_a_draft_is_the_text_without(pair, some_tokens, capsys) -> None:
    ids = some_tokens(60, VOCAB)
    prompts = [ids[:1], ids[1:20], ids[20:50], ids[50:]]
    file = pair / "prompts.csv"
    file.write_text("".join(f"{','.join(map(str, prompt))}\n" for prompt in prompts))
    line = ["run", "--engine-dir", str(pair / "target"), "--input-file", str(file), "--json"]
    line += ["--max-output-len", "60", "--log-level", "error"]
    found = []
    for options in ([], ["--draft-engine", str(pair / "draft")]):
        capsys.readouterr()
        assert execute([*line, *options]) == 0
        found.append(json.loads(capsys.readouterr().out))
    plain, drafted = found
    assert drafted["outputs"] == plain["outputs"]
    speculation = drafted["stats"]["speculation"]
    assert 0 < speculation["accepted_tokens"] < speculation["draft_tokens"]
