"""Tiny random checkpoints of every family, and ModelOpt's whole-model export as the oracle."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmctl.quantize import calibration
from llmctl.quantize.layers import import_modelopt
from llmctl.quantize.plan import QuantizeOptions, QuantizePlan, plan_quantization
from llmctl.quantize.quantizer import run_quantization

VOCAB = 384
ROWS, ROW_LENGTH, BATCH = 6, 48, 2

SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# name -> (architecture, config fields beside SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama-tied-7-heads": (
        "Llama",
        {
            "tie_word_embeddings": True,
            "num_attention_heads": 7,
            "num_key_value_heads": 1,
            "head_dim": 80,
            "hidden_size": 112,
        },
    ),
    "mistral-window": ("Mistral", {"sliding_window": 16}),
    "mistral-mixed-window": (
        "Mistral",
        {"sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    "qwen2-mixed-window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3-tied": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
}
# --qformat -> ModelOpt's preset, of modelopt.torch.quantization
MODELOPT_CONFIGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "fp8": lambda mtq: mtq.FP8_DEFAULT_CFG,
    "w4a8_mxfp4_fp8": lambda mtq: mtq.W4A8_MXFP4_FP8_CFG,
}


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE over a few documents of the demo text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["def f(self, x):\n    return self.x + x\n" * 20], trainer)
    return tokenizer


def save_model(folder: Path, family: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a random checkpoint. Norms and biases are random too, so that losing one shows."""
    import transformers

    architecture, fields = FAMILIES[family]
    config = getattr(transformers, f"{architecture}Config")(**(SHAPE | fields))
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(0, 0.5)
        elif "norm" in name:
            parameter.data.uniform_(0.5, 1.5)
        elif "proj" in name:  # far enough from the default 0.02 that attention is not uniform
            parameter.data.normal_(0, 0.08)
    model.to(dtype).save_pretrained(folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    return folder


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """checkpoints(family, dtype) -> a folder that tests only read."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def get(family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
        key = (family, dtype)
        if key not in made:
            made[key] = save_model(tmp_path_factory.mktemp("source") / family, family, dtype)
        return made[key]

    return get


@pytest.fixture
def editable(checkpoints: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """editable(change, family) -> a private copy, its tensors passed through `change`."""
    import shutil

    def get(change: Callable[[dict[str, torch.Tensor]], None], family: str = "llama") -> Path:
        folder = tmp_path / "edited"
        shutil.copytree(checkpoints(family), folder)
        tensors = {k: v.clone() for k, v in load_file(folder / "model.safetensors").items()}
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return get


def plan(source: Path, output: Path, **changes: Any) -> QuantizePlan:
    """A plan with the small sizes of these tests."""
    fields: dict[str, Any] = {
        "calib_size": ROWS,
        "calib_max_seq_length": ROW_LENGTH,
        "batch_size": BATCH,
        "device": "cpu",
    }
    return plan_quantization(QuantizeOptions(source, output, **(fields | changes)))


@pytest.fixture(scope="session")
def plan_tiny() -> Callable[..., QuantizePlan]:
    """plan_tiny(source, output, **options)."""
    return plan


@pytest.fixture(scope="session")
def quantized(
    checkpoints: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """quantized(family, **options) -> what llmctl writes; made once, tests only read it."""
    made: dict[str, Path] = {}

    def get(family: str = "llama", stored: torch.dtype = torch.bfloat16, **options: Any) -> Path:
        key = f"{family} {stored} {sorted(options.items())}"
        if key not in made:
            output = tmp_path_factory.mktemp("quantized") / "out"
            run_quantization(plan(checkpoints(family, stored), output, **options))
            made[key] = output
        return made[key]

    return get


@pytest.fixture(scope="session")
def modelopt_model(checkpoints: Callable[..., Path]) -> Callable[..., Any]:
    """modelopt_model(family, kv, stored, dtype, …): fake-quantized by ModelOpt as a whole.

    has_head: lm_head is quantized as the other linears are. qformat: `--qformat`.
    """
    from transformers import AutoModelForCausalLM

    def get(
        family: str,
        kv_cache_dtype: str = "fp8",
        stored: torch.dtype = torch.bfloat16,
        dtype: Any = "auto",
        has_head: bool = False,
        qformat: str = "fp8",
    ) -> Any:
        source = checkpoints(family, stored)
        rows = calibration.read_rows(
            "demo",
            source / "tokenizer.json",
            num_rows=ROWS,
            row_length=ROW_LENGTH,
            vocab=VOCAB,
            seed=1234,
        )
        mtq = import_modelopt()
        config = copy.deepcopy(MODELOPT_CONFIGS[qformat](mtq))
        config["algorithm"] = "max"  # the preset of MXFP4 leaves out the calibration of inputs
        if kv_cache_dtype == "fp8":
            config["quant_cfg"] += copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
        if has_head:
            linears = {
                entry["quantizer_name"].removeprefix("*"): entry["cfg"]
                for entry in config["quant_cfg"]
                if entry["quantizer_name"] in ("*weight_quantizer", "*input_quantizer")
            }
            config["quant_cfg"] += [
                {"quantizer_name": f"*lm_head*{name}", "cfg": cfg} for name, cfg in linears.items()
            ]
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype).eval()
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")  # ModelOpt's remarks on versions
            return mtq.quantize(
                model,
                config,
                lambda m: [m(input_ids=b, use_cache=False) for b in rows.split(BATCH)],
            )

    return get


@pytest.fixture(scope="session")
def modelopt_export(
    modelopt_model: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """Like modelopt_model, exported: the folder every tensor is compared with."""

    def get(*args: Any, **kwargs: Any) -> Path:
        model = modelopt_model(*args, **kwargs)
        folder = tmp_path_factory.mktemp("modelopt")
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("ignore")
            from modelopt.torch.export import export_hf_checkpoint

            export_hf_checkpoint(model, export_dir=folder)
        return folder

    return get


@pytest.fixture
def raw_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """raw_checkpoint(tensors, config) -> a folder that need not make sense."""

    def get(
        tensors: dict[str, torch.Tensor] | None = None, config: dict[str, Any] | None = None
    ) -> Path:
        folder = tmp_path / "raw"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config or {"model_type": "llama"}))
        if tensors is not None:
            save_file(tensors, folder / "model.safetensors")
        return folder

    return get
