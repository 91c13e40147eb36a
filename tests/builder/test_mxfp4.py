"""Engines of MXFP4 weights against ModelOpt's own reading of the checkpoint, and what is refused.

The oracle is Hugging Face's model of the unquantized checkpoint with the weight of every quantized
linear replaced by what ModelOpt dequantizes, its input rounded to FP8 with the stored scale, and
keys and values likewise where their cache is FP8.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from llmctl.builder.build import STORED, EnginePlan, plan_build, run_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import open_engine
from llmctl.builder.generated import LoadFormat
from llmctl.builder.kernels import (
    largest_shapes,
    meta_cache,
    meta_calls,
    meta_step,
    plan_launches,
    scratch_bytes,
    step_limits,
)
from llmctl.builder.mxfp4 import MxRows, PackedMxRows
from llmctl.builder.packing import RowOrder
from llmctl.cli.main import execute
from llmctl.errors import (
    BadTensorShape,
    BadTensorValue,
    LlmctlError,
    MissingTensor,
    UnknownQuantization,
    Unsupported,
)
from llmctl.plugins.cuda.kernel import LaunchEnv, StepShape
from llmctl.plugins.packed_linear import layout
from llmctl.quantize.layers import import_modelopt
from llmctl.quantize.plan import QuantizeOptions, plan_quantization
from llmctl.quantize.quantizer import run_quantization
from llmctl.runtime.tensorrt_open import kernels_a_step

MAX_RELATIVE_L2 = 1e-2  # acceptance limit against ModelOpt, as in test_fp8.py
VOCAB = 300  # with 44 rows in the last tile of the head
# K of 96, 192 and 288: less than a packed block of 256, and more with a rest of one block of 32.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
CASES = {  # name -> options of the quantization
    "plain": {},
    "head": {"quantize_lm_head": True},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "head, fp8 cache": {"quantize_lm_head": True, "kv_cache_dtype": "fp8"},
}
CUDA_LIMITS = {"max_batch_size": 1, "max_num_tokens": 48, "max_draft_len": 47, "max_seq_len": 96}
LAYER = "model.layers.0"
DOWN = f"{LAYER}.mlp.down_proj"

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def checkpoints(
    tmp_path_factory: pytest.TempPathFactory, module_model: Callable[..., PreTrainedModel]
) -> Callable[[str], Path]:
    """checkpoints(case) -> the folder that `llmctl quantize` writes; "source": what it read."""
    made: dict[str, Path] = {}

    def checkpoint(case: str) -> Path:
        if case not in made:
            folder = tmp_path_factory.mktemp("mxfp4") / "checkpoint"
            if case == "source":
                module_model("llama", gain=0.5, **SHAPE).save_pretrained(folder)
                write_tokenizer(folder)
            else:
                options = QuantizeOptions(
                    checkpoint("source"),
                    folder,
                    qformat="w4a8_mxfp4_fp8",
                    calib_size=4,
                    calib_max_seq_length=64,
                    **CASES[case],
                )
                run_quantization(plan_quantization(options))
            made[case] = folder
        return made[case]

    return checkpoint


def write_tokenizer(folder: Path) -> None:
    """Bytes, each a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture
def editable(checkpoints: Callable[[str], Path], tmp_path: Path) -> Path:
    """A private copy of the plain checkpoint."""
    return Path(shutil.copytree(checkpoints("plain"), tmp_path / "checkpoint"))


# ---- the oracle ----


def modelopt_weight(stored: Tensors, module: str) -> torch.Tensor:
    """float32 [rows, K]: what ModelOpt reads the codes and powers of a linear as."""
    import_modelopt()  # a direct import warns about versions
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    codes, scales = stored[f"{module}.weight"], stored[f"{module}.weight_scale"]
    shape = torch.Size((len(codes), 2 * codes.shape[1]))
    tensor = MXFP4QTensor(shape, torch.float32, codes)
    return tensor.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})


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
    case: str, program_name: str, checkpoints, build_engine, open_test_engine, some_tokens
) -> None:
    tokens = some_tokens(40, VOCAB)
    source, quantized = checkpoints("source"), checkpoints(case)
    wanted = logits_of(oracle(source, quantized), tokens)
    engine = open_test_engine(build_engine(quantized), program_name)
    assert (engine.plan.ops[-1].tactic == "cpu.linear.fp8") == ("head" in case)
    cache = "float8_e4m3fn" if "cache" in case else "float32"
    assert engine.plan.kv_cache.dtype == cache
    found = engine.run(tokens)
    assert relative_l2(found, wanted) < MAX_RELATIVE_L2
    plain = AutoModelForCausalLM.from_pretrained(source)
    assert relative_l2(found, logits_of(plain, tokens)) > 5 * MAX_RELATIVE_L2  # four bits show


def test_weights_are_stored_as_fp8_that_are_modelopts_numbers(checkpoints, build_engine) -> None:
    stored = load_file(checkpoints("head") / "model.safetensors")
    plan, weights = open_engine(build_engine(checkpoints("head")))
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


def parts_of(name: str) -> list[str]:
    """The checkpoint modules that a linear of the engine merges."""
    merged = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    prefix, _, last = name.rpartition(".")
    return [f"{prefix}.{part}" for part in merged[last]] if last in merged else [name]


@pytest.fixture(scope="module")
def pair(checkpoints: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with engines: a target of MXFP4, and a draft with another head and cache."""
    folder = tmp_path_factory.mktemp("pair")
    for role, case in (("target", "plain"), ("draft", "head, fp8 cache")):
        request = BuildRequest(max_batch_size=8, max_draft_len=4 if role == "target" else 0)
        run_build(plan_build(checkpoints(case), request, backend="cpu"), folder / role)
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


# ---- packed for a GPU ----


def plan_cuda(folder: Path, load_format: LoadFormat = STORED, **limits: int) -> EnginePlan:
    """The plan of a cuda engine, without its kernels."""
    return plan_build(
        folder,
        BuildRequest(**(CUDA_LIMITS | limits), dtype="bfloat16"),
        backend="cuda",
        compute_capability="9.0",
        load_format=load_format,
        with_binaries=False,
    )


def row_order(op: str, rows: int) -> torch.Tensor:
    """Packed row i holds logical row [i] (plugins/packed_linear/layout.py)."""
    heads = [SHAPE[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim")]
    if op == "packed_linear_rope_kv":
        return layout.rope_order(*heads)
    if op == "packed_linear_swiglu":
        return layout.pair_order(rows // 2)
    return layout.plain_order(rows)


def test_packed_weights_are_four_bits_and_modelopts_numbers(checkpoints) -> None:
    stored = load_file(checkpoints("head") / "model.safetensors")
    engine = plan_cuda(checkpoints("head"))
    tensors = {tensor.name: tensor for tensor in engine.plan.tensors}
    checked = []
    for op in engine.plan.ops:
        if not op.op.startswith("packed_linear"):
            continue
        wanted = torch.cat([modelopt_weight(stored, module) for module in parts_of(op.name)])
        rows, inner = wanted.shape
        name = op.inputs["weight"]
        shape = (-(-rows // 64), -(-inner // 256), 64, 136)
        assert (tensors[name].dtype, tuple(tensors[name].shape)) == ("uint8", shape)
        weight = values_of(engine, name)
        assert weight.dtype == torch.uint8 and weight.shape == shape
        order = row_order(op.op, rows)
        packed = layout.unpack(weight, len(order), inner).float()
        packed *= values_of(engine, op.inputs["weight_scale"])[:, None]
        assert torch.equal(layout.restore(packed, order), wanted), op.name
        assert not packed[order < 0].any()
        checked.append((op.op, inner))
    assert checked == [
        *[
            ("packed_linear_rope_kv", 96),
            ("packed_linear", 192),
            ("packed_linear_swiglu", 96),
            ("packed_linear", 288),
        ]
        * 2,
        ("packed_linear", 96),
    ]


def values_of(engine: EnginePlan, name: str) -> torch.Tensor:
    """A weight as the engine file would hold it."""
    return torch.cat(list(engine.sources[name].chunks(engine.checkpoint)))


@pytest.mark.parametrize("case", ["plain", "head, fp8 cache"])
def test_the_packed_plan_gives_the_logits_of_the_cpu_s_to_the_bit(
    case: str, checkpoints, build_engine, open_test_engine, some_tokens, tmp_path
) -> None:
    """Both by the operators' references, which unpack weights."""
    tokens = some_tokens(37, VOCAB)
    run_build(plan_cuda(checkpoints(case)), tmp_path / "cuda")
    found = open_test_engine(tmp_path / "cuda", "reference").run(tokens)
    plain = build_engine(checkpoints(case), dtype="bfloat16", **CUDA_LIMITS)
    assert torch.equal(found, open_test_engine(plain, "reference").run(tokens))


def test_a_weight_larger_than_a_chunk_is_made_piece_by_piece(checkpoints, monkeypatch) -> None:
    engine = plan_cuda(checkpoints("plain"))
    parts = tuple((f"{LAYER}.mlp.{part}_proj.weight", (288, 96)) for part in ("gate", "up"))
    packed = PackedMxRows(MxRows(parts), RowOrder("pair", (288,)))
    whole = [values_of(engine, f"{LAYER}.mlp.gate_up_proj.weight")]
    whole.append(torch.cat(list(MxRows(parts).chunks(engine.checkpoint))).view(torch.uint8))
    assert whole[1].shape == (576, 96)
    for chunk_bytes, counts in ((1 << 20, (1, 2)), (64 * 96 * 4, (3, 4)), (1, (9, 576))):
        monkeypatch.setattr("llmctl.builder.mxfp4.CHUNK_BYTES", chunk_bytes)
        for source, wanted, count in zip((packed, MxRows(parts)), whole, counts, strict=True):
            pieces = list(source.chunks(engine.checkpoint))
            assert len(pieces) == count
            assert torch.equal(torch.cat([p.view(torch.uint8) for p in pieces]), wanted)


def test_the_memory_plan_counts_the_launches_that_expand_weights(checkpoints) -> None:
    limits = {"max_batch_size": 32, "max_draft_len": 7, "max_num_tokens": 256, "max_seq_len": 96}
    engine = plan_cuda(checkpoints("head"), **limits)
    assert engine.plan.ops[-1].name == "lm_head"
    sizes = step_limits(engine.plan, engine.limits)
    step, cache = meta_step(sizes), meta_cache(engine.plan, sizes)

    def memory(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    for tokens in (1, 32, 64, 65, 256):
        shape = StepShape(tokens, tokens if tokens < 32 else 32, tokens, 8, 96)
        count = 0
        for call, extent in meta_calls(engine.plan):
            env = LaunchEnv(step, cache, sizes, extent, memory)
            module = import_module(f"llmctl.plugins.{call.op}.kernel")
            count += len(module.launches(call, env, shape))
        assert len(engine.plan.ops) <= count <= kernels_a_step(engine.plan, tokens), tokens
    # Two layers of four products and the head are expanded for more tokens than 64.
    assert kernels_a_step(engine.plan) == kernels_a_step(engine.plan, 64) + 9


def test_prompts_need_scratch_memory_of_one_fp8_copy_of_each_size(checkpoints) -> None:
    scratch = []
    for tokens in (64, 96):
        engine = plan_cuda(checkpoints("plain"), max_num_tokens=tokens, max_draft_len=0)
        named: dict[str, int] = {}

        def memory(name: str, shape: Any, dtype: torch.dtype, named: Any = named) -> torch.Tensor:
            named[name] = math.prod(shape) * dtype.itemsize
            return torch.empty(shape, dtype=dtype, device="meta")

        sizes = step_limits(engine.plan, engine.limits)
        for shape in largest_shapes(sizes):
            plan_launches(engine.plan, sizes, shape, memory)
        assert sum(named.values()) == scratch_bytes(engine.plan, sizes)
        scratch.append(sorted(size for name, size in named.items() if "expanded" in name))
    # [rows, K] in tiles of 64 rows by 256 of K: q, k and v; o; gate and up; down
    wanted = [320 * 256, 128 * 256, 576 * 256, 128 * 512]
    assert scratch == [[], sorted(wanted)]


def test_a_generated_engine_has_the_tensors_of_a_stored_one(checkpoints, tmp_path) -> None:
    source = checkpoints("head, fp8 cache")
    for name in ("config.json", "hf_quant_config.json"):
        shutil.copyfile(source / name, tmp_path / name)
    stored = plan_cuda(source).plan
    made = plan_cuda(tmp_path, load_format=LoadFormat("dummy")).plan
    assert made.ops == stored.ops
    assert [(t.name, t.dtype, t.shape) for t in made.tensors] == [
        (t.name, t.dtype, t.shape) for t in stored.tensors
    ]


# ---- what is refused ----


def edit(folder: Path, change: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def configure(folder: Path, **fields: Any) -> Path:
    """Change fields of the quantization, which config.json alone then describes."""
    (folder / "hf_quant_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def forget_quantization(folder: Path) -> Path:
    (folder / "hf_quant_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def refuse(
    folder: Path, error: type[LlmctlError], text: str, backend: str = "cpu", **fields: Any
) -> LlmctlError:
    """Building raises `error` and leaves nothing beside the checkpoint."""
    before = sorted(folder.parent.iterdir())
    with pytest.raises(error, match=text) as caught:
        engine = plan_build(
            folder, BuildRequest(**fields), backend=backend, with_binaries=backend != "cuda"
        )
        if backend == "cuda":
            for source in engine.sources.values():
                list(source.chunks(engine.checkpoint))
        else:
            run_build(engine, folder.parent / "engine")
    assert sorted(folder.parent.iterdir()) == before
    return caught.value


BACKENDS = pytest.mark.parametrize("backend", ["cpu", "cuda"])


@BACKENDS
def test_a_power_that_is_nan(backend: str, editable: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"][5, 3] = 255

    folder = edit(editable, change)
    refuse(folder, BadTensorValue, f"{DOWN}.weight_scale holds NaN", backend, dtype="bfloat16")


@BACKENDS
def test_a_block_too_far_below_its_row(backend: str, editable: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"][70] = 120
        tensors[f"{DOWN}.weight_scale"][70, 4] = 105  # its codes are columns 128 to 159
        tensors[f"{DOWN}.weight"][70, 64:80] = 0
        tensors[f"{DOWN}.weight"][70, 71] = 0x10  # one half

    text = rf"{DOWN}.weight: block 4 of row 70 is 2\*\*15 below the row's largest; up to 2\*\*14"
    error = refuse(edit(editable, change), BadTensorValue, text, backend, dtype="bfloat16")
    assert "--qformat w4a8_mxfp4_fp8" in error.fix


@pytest.mark.parametrize(("below", "code"), [(14, 0x7F), (15, 0x80), (120, 0x08)])
def test_a_low_block_is_taken_where_e4m3_holds_it(
    below: int, code: int, editable: Path, build_engine, open_test_engine
) -> None:
    """2**14 below with any codes; further below with zeros of either sign."""

    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"][70] = 120
        tensors[f"{DOWN}.weight_scale"][70, 4] = 120 - below
        tensors[f"{DOWN}.weight"][70, 64:80] = code

    stored = load_file(edit(editable, change) / "model.safetensors")
    _, weights = open_engine(build_engine(editable))
    found = weights[f"{DOWN}.weight"].float() * weights[f"{DOWN}.weight_scale"][:, None]
    assert torch.equal(found, modelopt_weight(stored, DOWN))
    engine = plan_cuda(editable)
    packed = layout.unpack(values_of(engine, f"{DOWN}.weight"), 96, 288).view(torch.uint8)
    assert torch.equal(packed, weights[f"{DOWN}.weight"].view(torch.uint8))


def as_fp8(tensors: Tensors, module: str) -> None:
    """Store a linear as ModelOpt's FP8 instead."""
    weight = modelopt_weight(tensors, module)
    scale = weight.abs().max() / 448
    tensors[f"{module}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
    tensors[f"{module}.weight_scale"] = scale


def as_plain(tensors: Tensors, module: str) -> None:
    """Store a linear unquantized instead."""
    tensors[f"{module}.weight"] = modelopt_weight(tensors, module)
    for name in ("weight_scale", "input_scale"):
        del tensors[f"{module}.{name}"]


def test_an_fp8_weight_where_four_bits_are_declared(editable: Path) -> None:
    folder = edit(editable, lambda tensors: as_fp8(tensors, DOWN))
    text = rf"{DOWN}.weight in .* is F8_E4M3, but the config declares W4A8_MXFP4_FP8"
    refuse(folder, BadTensorShape, text)


def test_a_plain_weight_where_four_bits_are_declared(editable: Path) -> None:
    folder = edit(editable, lambda tensors: as_plain(tensors, DOWN))
    refuse(folder, BadTensorShape, rf"{DOWN}.weight in .* is F32, but the config declares W4A8")


def test_four_bits_where_fp8_is_declared(editable: Path) -> None:
    text = r"q_proj.weight in .* is U8, but the config declares FP8"
    refuse(configure(editable, quant_algo="FP8"), BadTensorShape, text)


def test_four_bits_where_nothing_is_declared(editable: Path) -> None:
    text = "q_proj.weight in .* is U8, but neither config.json nor hf_quant_config.json"
    error = refuse(forget_quantization(editable), UnknownQuantization, text)
    assert error.fix == "fetch the config files again"


def test_four_bits_that_the_config_excludes(editable: Path) -> None:
    folder = configure(editable, ignore=["lm_head", "*.o_proj"])
    refuse(folder, BadTensorShape, r"o_proj.weight in .* is U8, but the config excludes it")


@pytest.mark.parametrize("scale", ["weight_scale", "input_scale"])
def test_a_missing_scale_is_named_with_the_probable_reason(editable: Path, scale: str) -> None:
    folder = edit(editable, lambda tensors: tensors.__delitem__(f"{DOWN}.{scale}"))
    refuse(folder, MissingTensor, rf"declares W4A8_MXFP4_FP8 .* lacks {DOWN}.{scale}; probably")


@pytest.mark.parametrize("shape", [(96, 18), (96, 8), (864,), ()])
def test_powers_of_another_shape(editable: Path, shape: tuple[int, ...]) -> None:
    scales = torch.full(shape, 120, dtype=torch.uint8)
    folder = edit(editable, lambda tensors: tensors.update({f"{DOWN}.weight_scale": scales}))
    text = rf"{DOWN}.weight_scale .*shape \{list(shape)}; .*implies \[96, 9\]"
    refuse(folder, BadTensorShape, text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.float8_e4m3fn])
def test_powers_of_another_type(editable: Path, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        tensors[f"{DOWN}.weight_scale"] = torch.ones(96, 9).to(dtype)

    refuse(edit(editable, change), BadTensorShape, f"{DOWN}.weight_scale .* U8")


def test_codes_of_another_shape(editable: Path) -> None:
    codes = torch.zeros(96, 288, dtype=torch.uint8)  # one a byte
    folder = edit(editable, lambda tensors: tensors.update({f"{DOWN}.weight": codes}))
    refuse(folder, BadTensorShape, r"shape \[96, 288\]; .*implies \[96, 144\]")


def test_an_input_scale_that_cannot_be(editable: Path) -> None:
    folder = edit(
        editable, lambda tensors: tensors.update({f"{DOWN}.input_scale": torch.tensor(0.0)})
    )
    refuse(folder, BadTensorValue, f"{DOWN}.input_scale holds 0.0")


def test_columns_that_blocks_do_not_divide(new_model, save) -> None:
    folder = save(new_model("llama", **(SHAPE | {"intermediate_size": 112})))
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "modelopt",
        "quant_algo": "W4A8_MXFP4_FP8",
        "ignore": ["lm_head"],
    }
    (folder / "config.json").write_text(json.dumps(config))
    text = r"down_proj.weight has 112 columns .*has blocks of 32"
    refuse(folder, BadTensorShape, text)
    with pytest.raises(BadTensorShape, match=text):  # from config.json alone, too
        plan_cuda(folder, load_format=LoadFormat("dummy"))


def test_parts_of_one_merged_linear_that_are_quantized_differently(editable: Path) -> None:
    folder = edit(editable, lambda tensors: as_plain(tensors, f"{LAYER}.self_attn.k_proj"))
    configure(folder, ignore=["lm_head", f"{LAYER}.self_attn.k_proj"])
    error = refuse(folder, Unsupported, r"q_proj, .*k_proj, .*v_proj are quantized differently")
    assert "excluding all of them or none" in error.fix


def test_linears_of_both_kinds_in_one_checkpoint_cannot_be_declared(editable: Path) -> None:
    module = f"{LAYER}.self_attn.k_proj"
    folder = edit(editable, lambda tensors: as_fp8(tensors, module))
    refuse(folder, BadTensorShape, rf"{module}.weight in .* is F8_E4M3")
    configure(folder, quant_algo="MIXED_PRECISION")
    refuse(folder, UnknownQuantization, "MIXED_PRECISION")


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-rtx"])
def test_backends_without_a_product_of_four_bits_refuse(
    backend: str, editable: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llmctl.builder.build.find_package", lambda _: object())
    text = f"weights in W4A8_MXFP4_FP8 are refused: the {backend} backend has no product of them"
    error = refuse(editable, Unsupported, text, backend, dtype="bfloat16")
    assert error.fix.startswith("--backend cuda")
