"""Engines without a checkpoint's weights: --load-format dummy and planted.

A folder with config.json (and hf_quant_config.json) is treated as if it had every tensor that the
config implies, in ModelOpt's layout. Instead of weights the engine stores how
`runtime/engines/planted_weights.py` generates them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from llmctl.builder.engine_format import Plan
from llmctl.builder.models.decoder import EMBEDDING, LM_HEAD
from llmctl.builder.models.family import ModelConfig
from llmctl.builder.network import Network
from llmctl.builder.scales import checkpoint_shapes
from llmctl.builder.speculative_modes import SPECULATIVE_MODES
from llmctl.errors import BadConfig, CheckpointNotFound, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.quantize.checkpoint import DTYPES, Checkpoint, TensorInfo
from llmctl.quantize.format import (
    CONFIG_FILE,
    find_scheme,
    has_file,
    quantization_documents,
    read_json,
    read_quantization,
    read_stated_quantization,
)

LOAD_FORMATS = ("auto", "dummy", "planted")
ROLES = ("target", "draft")
STANDARD_ACCEPTANCE = 0.873  # 6.1 tokens a round of 10 drafts, what NVIDIA's article measured
_STORED_NAMES = {name: stored for stored, (name, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class LoadFormat:
    """Where weights come from: "auto" is the checkpoint; the other fields apply to the other
    formats.

    planted: a target whose greedy text is known, and drafts whose tokens are each right with
    probability `acceptance`, if target and draft have the same seed and vocabulary. That of a
    target is the acceptance of its draft heads, if it has some. `head_qformat` is the --qformat of
    those heads; None: the checkpoint's. `has_files`: whether the checkpoint's weights are there;
    without them engines can be planned, not built.
    """

    name: str = "auto"
    seed: int = 0
    role: str = "target"
    acceptance: float = STANDARD_ACCEPTANCE
    head_qformat: str | None = None
    has_files: bool = True

    def __post_init__(self) -> None:
        _choice("load-format", self.name, LOAD_FORMATS)
        _choice("planted-role", self.role, ROLES)
        if type(self.acceptance) not in (int, float) or not 0 <= self.acceptance <= 1:
            raise BadConfig(f"--planted-acceptance is {self.acceptance!r}; it must be in [0, 1]")
        if self.head_qformat is not None:
            find_scheme(self.head_qformat)
        if type(self.seed) is not int or not 0 <= self.seed < 1 << 63:
            raise BadConfig(f"--seed is {self.seed!r}; it must be from 0 to 2**63 - 1")

    @property
    def is_generated(self) -> bool:
        """Whether the engine makes its weights."""
        return self.name != "auto"

    @property
    def is_read(self) -> bool:
        """Whether the weights are the checkpoint's, and there."""
        return self.has_files and not self.is_generated

    def open(self, folder: Path) -> Checkpoint:
        """The checkpoint, or what its config says of weights that are not read. Raises the
        checkpoint errors."""
        if self.is_read:
            return Checkpoint.open(folder)
        checkpoint = open_config(folder)
        if self.head_qformat is None:
            return checkpoint
        documents = quantization_documents(find_scheme(self.head_qformat), None, [], "")
        info = read_quantization({"quantization_config": documents[1]}, documents[0], "heads")
        assert info is not None
        modules = (mode.module for mode in SPECULATIVE_MODES.values() if mode.has_heads)
        return replace(checkpoint, apart=dict.fromkeys(modules, info))

    def to_dict(
        self, model: ModelConfig, config: dict[str, Any], heads: Mapping[str, Any]
    ) -> dict[str, Any]:
        """`weights` of the engine's config.json. heads: the facts of its draft heads; where they
        have a vocabulary of their own, the text is of that. Raises Unsupported for what cannot be
        planted."""
        if self.name == "auto":
            return {"load_format": "auto"}
        if self.name == "dummy":
            return {"load_format": "dummy", "seed": self.seed}
        if model.tie_word_embeddings:
            raise Unsupported(
                "a planted model cannot have its head tied to the embedding",
                fix='set "tie_word_embeddings": false in config.json',
            )
        vocab_size = int(heads.get("draft_vocab_size", model.vocab_size))
        first, stop = ordinary_tokens(config, vocab_size)
        return {
            "load_format": "planted",
            "seed": self.seed,
            "role": self.role,
            "acceptance": self.acceptance,
            "ordinary_tokens": [first, stop],
        }


def ordinary_tokens(config: dict[str, Any], vocab_size: int) -> tuple[int, int]:
    """The longest range [first, stop) of the first ids without the bos, eos and pad ids of
    config.json."""
    special = {-1, vocab_size}
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        special |= {i for i in (value if isinstance(value, list) else [value]) if i is not None}
    ids = sorted(i for i in special if -1 <= i <= vocab_size)
    gaps = zip(ids, ids[1:], strict=False)
    before, after = max(gaps, key=lambda gap: (gap[1] - gap[0], -gap[0]))
    return before + 1, after


def open_config(folder: Path) -> Checkpoint:
    """A checkpoint of which only the config documents are read; it has no tensors yet.

    Raises CheckpointNotFound, CorruptFile, UnknownQuantization.
    """
    path = folder / CONFIG_FILE
    if not has_file(path):
        raise CheckpointNotFound(f"{path} does not exist", fix="give a folder with config.json")
    config = read_json(path)
    return Checkpoint(folder, config, {}, read_stated_quantization(folder, config))


def require_generator(load_format: LoadFormat, backend: str, mode: str) -> None:
    """Raise Unsupported where a backend cannot generate such weights, BadConfig for a format of
    heads that engines of the mode do not have."""
    if load_format.head_qformat is not None and not SPECULATIVE_MODES[mode].has_heads:
        raise BadConfig(
            f"--planted-head-qformat is for draft heads, and mode {mode} has none",
            fix="leave it out, or choose a mode with heads",
        )
    generators = BACKENDS[backend].generated_weights
    if load_format.is_generated and not generators:
        raise Unsupported(
            f"--load-format {load_format.name}: weights are generated on a GPU, and the backend is "
            f"{backend}",
            fix="--backend cuda, or a checkpoint of scripts.models.make_planted_checkpoints",
        )
    if load_format.is_generated and load_format.name not in generators:
        raise Unsupported(
            f"--load-format {load_format.name}: the {backend} backend has no generator of "
            f"{load_format.name} weights",
            fix="--load-format dummy, or a checkpoint of scripts.models.make_planted_checkpoints",
        )


def declare_tensors(checkpoint: Checkpoint, network: Network, num_layers: int) -> None:
    """Give the checkpoint every tensor that the recorded network and its quantization imply."""
    info = checkpoint.quantization
    shapes = dict(checkpoint_shapes(network, checkpoint))
    dtypes = dict.fromkeys(shapes, _STORED_NAMES[network.dtype])
    for node in network.nodes:
        weight = node.inputs.get("weight", "")
        module = LM_HEAD if weight == f"{EMBEDDING}.weight" else weight.removesuffix(".weight")
        own = checkpoint.quantization_of(module)
        if node.op != "linear" or own is None or own.scheme is None or own.excludes(module):
            continue
        storage, scale = own.scheme.storage, f"{weight}_scale"
        dtypes[weight], dtypes[scale] = storage.dtype, storage.scale_dtype
        if storage.block is None:
            is_channel = own.weight_strategy == "channel"
            shapes[scale] = storage.scale_shape(*shapes[weight], is_channel=is_channel)
        if own.activations == "static":
            shapes[f"{module}.input_scale"] = ()
    if info is not None and info.kv_cache_algo is not None:
        for layer in range(num_layers):
            prefix = f"model.layers.{layer}.self_attn"
            shapes |= {f"{prefix}.k_proj.k_scale": (), f"{prefix}.v_proj.v_scale": ()}
    nowhere = checkpoint.path / CONFIG_FILE
    checkpoint.tensors = {
        name: TensorInfo(name, dtypes.get(name, "F32"), shape, nowhere, 0, 0)
        for name, shape in shapes.items()
    }


def mark_generated(plan: Plan) -> Plan:
    """The plan with no weight stored: rotary tables are the model's own, all else is generated."""
    tensors = (replace(t, is_stored=t.kind != "weight") for t in plan.tensors)
    return replace(plan, tensors=tuple(tensors))


def _choice(flag: str, found: str, choices: Iterable[str]) -> None:
    if found not in choices:
        raise BadConfig(f"--{flag} is {found}; it must be one of {', '.join(choices)}")
