"""Engines of TensorRT-RTX compiled by the real builder, and what its log says about them."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.builder.engine_format import TrtPiece
from llmctl.builder.engine_plan import EnginePlan
from llmctl.builder.planted import LoadFormat
from llmctl.builder.tensorrt.engine import compile_pieces
from llmctl.builder.tensorrt.package import open_package
from llmctl.builder.tensorrt.pieces import Piece
from llmctl.builder.tensorrt.report import kernels
from llmctl.plugins.core.cache_home import cache_home
from llmctl.publish import write_cached

Layer = Mapping[str, Any]
# Of Llama 3.1 8B; the tests build fewer layers.
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
_NUMBER = {"num_bits": 8, "type": "float"}
QUANTIZATIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "fp8": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "input_activations": {**_NUMBER, "dynamic": False, "strategy": "tensor"},
                    "weights": {**_NUMBER, "dynamic": False, "strategy": "tensor"},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head"],
        }
    },
    "fp8 per token": {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "config_groups": {
                "group_0": {
                    "input_activations": {**_NUMBER, "dynamic": True, "strategy": "token"},
                    "weights": {**_NUMBER, "dynamic": False, "strategy": "channel"},
                    "targets": ["Linear"],
                }
            },
            "ignore": ["lm_head"],
        }
    },
}


def write_config(folder: Path, form: str, **fields: Any) -> Path:
    """A folder with nothing but config.json: the shapes of an 8B model, 3 layers unless told."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**LLAMA_8B, "num_hidden_layers": 3, **QUANTIZATIONS[form], **fields}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def plan_engine(checkpoint: Path, **options: Any) -> EnginePlan:
    """An engine for TensorRT-RTX, decided and not compiled; weights are not needed."""
    has_weights = any(checkpoint.glob("*.safetensors"))
    plugins = options.pop("plugins", None)
    capability = options.pop("compute_capability", "8.9")
    return plan_build(
        checkpoint,
        BuildRequest(**options),
        backend="tensorrt-rtx",
        compute_capability=capability,
        load_format=LoadFormat() if has_weights else LoadFormat("dummy"),
        plugins=plugins,
        with_binaries=False,
    )


def compile_engine(checkpoint: Path, **options: Any) -> tuple[EnginePlan, dict[str, TrtPiece]]:
    """(the engine, its pieces as compiled, by name).

    Kept between runs, as compiled kernels are. A piece's text says what it computes (`pieces.cut`);
    what is compiled for it follows from that and from our sources.
    """
    engine = plan_engine(checkpoint, **options)
    targets = str(engine.config.compute_capability).split(",")
    package = open_package("tensorrt-rtx")
    compiled_for = (package.name, package.version, targets, engine.limits)
    content = repr((_sources(), compiled_for, engine.config.plugin_config, engine.pieces))
    path = cache_home() / "llmctl/tensorrt_tests" / hashlib.sha256(content.encode()).hexdigest()
    if path.exists():
        described: tuple[TrtPiece, ...] = pickle.loads(path.read_bytes())
    else:
        described, plans = compile_pieces(
            package, engine.pieces, engine.limits, engine.config.plugin_config, targets
        )
        assert all(len(plans[piece.tensor]) == piece.num_bytes for piece in described)
        write_cached(path, pickle.dumps(described))
    return engine, {piece.name: piece for piece in described}


# What makes a network of pieces, compiles it and reads the report, and the types of these. What
# decides on pieces does not: they are compared themselves.
_SOURCES = (
    *("builder/network.py", "builder/config.py", "builder/plan.py", "builder/tensorrt/*.py"),
    *("plugins/core/op_spec.py", "plugins/core/operators.py", "plugins/backends/tensorrt/*.py"),
    *("plugins/*/tensorrt.py", "plugins/*/*/tensorrt.py"),
)


@cache
def _sources() -> str:
    """Hash of the sources above."""
    root = Path(__file__).resolve().parents[3]
    files = sorted(path for pattern in _SOURCES for path in root.glob(pattern))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def profile_kernels(piece: TrtPiece) -> Iterator[tuple[Mapping[str, Any], list[Layer]]]:
    """(profile, the kernels that run in it)."""
    for profile in piece.profiles:
        yield profile, kernels(profile)


def readers(layers: list[Layer], binding: str) -> list[Layer]:
    """The kernels that read a binding."""
    return [x for x in layers if any(i.partition(":")[0] == binding for i in x["inputs"])]


def types(operands: list[str]) -> list[str]:
    """ "fp8" of "name:fp8[-1,64]" for each operand."""
    return [operand.rpartition(":")[2].partition("[")[0] for operand in operands]


def linear_weights(piece: Piece, *, fp8: bool) -> list[str]:
    """The weights of a piece's products, FP8 or 16-bit ones."""
    linears = [node for node in piece.nodes if node.op == "linear"]
    return [n.inputs["weight"] for n in linears if ("weight_scale" in n.inputs) == fp8]
