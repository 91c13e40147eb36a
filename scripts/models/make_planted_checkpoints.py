"""Write Hugging Face checkpoints whose text is known, to measure speed and exactness with.

    python -m scripts.models.make_planted_checkpoints DIR --target 70b --draft 1b --acceptance 0.873
    python -m scripts.models.make_planted_checkpoints DIR --target 70b --draft 1b --config-only

writes DIR/target and DIR/draft: shapes of Llama 3, random layers, in FP8 or MXFP4 as
ModelOpt writes them, or BF16. Every engine reads them. The greedy text is a walk along one cycle
through all ordinary tokens; a draft's token is the target's with the given probability,
independently (`runtime/engines/planted_weights.py` says how). `"planted"` in config.json
tells which:

    planted_text(config["planted"], last_token_of_the_prompt, num_tokens)

--config-only writes the config files alone, for `llmctl build --load-format planted` or `dummy`,
which makes the same kind of weights on the device and needs no disk for them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from llmctl.builder.planted import ROLES, STANDARD_ACCEPTANCE, LoadFormat, ordinary_tokens
from llmctl.plugins.schemes.scheme import QuantizedScheme
from llmctl.plugins.schemes.table import PLAIN, quantized_schemes
from llmctl.publish import publish, require_space
from llmctl.quantize.format import (
    CONFIG_FILE,
    QUANT_CONFIG_FILE,
    find_scheme,
    quantization_documents,
)
from llmctl.runtime.engines.planted_weights import (
    CHUNK,
    INERT,
    SCALE,
    base_shares,
)
from scripts.models.planted_makers import MAKERS, random_values
from scripts.models.planted_shapes import SHAPES, config_json

REPOSITORY = Path(__file__).resolve().parents[2]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
HEAD = "lm_head"
MOST_WRITERS = 8  # each holds a layer


@dataclass(frozen=True, slots=True)
class Recipe:
    """What to write. `quantized_head`: the output projection too (its codes are exact)."""

    shape: str
    role: str = "target"
    acceptance: float = STANDARD_ACCEPTANCE
    seed: int = 0
    quantization: str | None = "fp8"  # a --qformat; None: BF16
    quantized_head: bool = False

    def __post_init__(self) -> None:
        LoadFormat("planted", self.seed, self.role, self.acceptance)  # refuses what is out of range

    def is_quantized(self, module: str) -> bool:
        """Whether this linear is."""
        return self.quantization is not None and (module != HEAD or self.quantized_head)

    @property
    def scheme(self) -> QuantizedScheme | None:
        """Of the linears that are quantized."""
        return None if self.quantization is None else find_scheme(self.quantization)

    def documents(self) -> dict[str, dict[str, Any]]:
        """config.json, and hf_quant_config.json of a quantized checkpoint."""
        config = config_json(SHAPES[self.shape])
        first, stop = ordinary_tokens(config, config["vocab_size"])
        config["planted"] = {
            "seed": self.seed,
            "role": self.role,
            "acceptance": self.acceptance,
            "ordinary_tokens": [first, stop],
        }
        if self.scheme is None:
            return {CONFIG_FILE: config}
        exclude = [] if self.quantized_head else [HEAD]
        nested, flat = quantization_documents(self.scheme, "FP8", exclude, "planted")
        return {CONFIG_FILE: config | {"quantization_config": flat}, QUANT_CONFIG_FILE: nested}


def write_checkpoint(
    folder: Path,
    recipe: Recipe,
    *,
    config_only: bool = False,
    tokenizer_dir: Path | None = None,
    on_shard: Callable[[str], None] = lambda _: None,
) -> None:
    """The folder of a planted checkpoint; it appears whole or not at all.

    Raises OutputExists and OutOfDisk.
    """
    if not config_only:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        require_space(folder.absolute().parent, num_bytes(recipe))
    with publish(folder) as scratch:
        for name, document in recipe.documents().items():
            (scratch / name).write_text(json.dumps(document, indent=2) + "\n")
        if config_only:
            return
        if tokenizer_dir is not None:
            for name in TOKENIZER_FILES:
                shutil.copy(tokenizer_dir / name, scratch / name)
        _write_weights(scratch, recipe, on_shard)


def num_bytes(recipe: Recipe) -> int:
    """Bytes of all weights, scales and headers left out."""
    shape = SHAPES[recipe.shape]
    layer = sum(rows * columns for rows, columns in shape.linears().values())
    table = shape.vocab * shape.hidden

    def width(is_quantized: bool) -> float:
        return (recipe.scheme if recipe.scheme and is_quantized else PLAIN).weight_bytes

    linears = shape.layers * layer * width(recipe.quantization is not None)
    return int(linears + 2 * table + table * width(recipe.is_quantized(HEAD)))


def _write_weights(folder: Path, recipe: Recipe, on_shard: Callable[[str], None]) -> None:
    """A shard for each layer and one for the rest, and their index. Drawing numbers takes most of
    the time and one core, so shards are written side by side, each from a generator of its own:
    what a seed gives does not depend on how many cores there are."""
    num_layers = SHAPES[recipe.shape].layers

    def write_shard(index: int) -> dict[str, str]:
        drawn = np.random.SeedSequence((recipe.seed, index)).generate_state(1)
        generator = torch.Generator().manual_seed(int(drawn[0]))
        if index == num_layers:
            name, tensors = "outer.safetensors", _outer(recipe, generator)
        else:
            name, tensors = f"layer-{index:03d}.safetensors", _layer(recipe, index, generator)
        save_file(tensors, folder / name, metadata={"format": "pt"})
        return dict.fromkeys(tensors, name)

    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(min(MOST_WRITERS, os.cpu_count() or 1)) as pool:
        for names in pool.map(write_shard, range(num_layers, -1, -1)):  # the longest first
            weight_map.update(names)
            on_shard(next(iter(names.values())))
    index_json = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_json))


def _layer(recipe: Recipe, index: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors of one layer: random, but too quiet at its two outputs to move a code."""
    shape, prefix = SHAPES[recipe.shape], f"model.layers.{index}."
    ones = torch.ones(shape.hidden, dtype=torch.bfloat16)
    tensors = {
        f"{prefix}input_layernorm.weight": ones,
        f"{prefix}post_attention_layernorm.weight": ones.clone(),
    }
    for name, dims in shape.linears().items():
        spread = dims[1] ** -0.5 * (INERT if name.endswith(("o_proj", "down_proj")) else 1)
        module = f"{prefix}{name}"
        if recipe.scheme is None:
            tensors[f"{module}.weight"] = random_values(dims, spread, torch.bfloat16, generator)
        else:
            stored = MAKERS[recipe.scheme.name].random(dims, spread, generator)
            tensors |= _stored(module, *stored)
    if recipe.quantization is not None:
        for name in "kv":
            tensors[f"{prefix}self_attn.{name}_proj.{name}_scale"] = torch.tensor(SCALE)
    return tensors


def _outer(recipe: Recipe, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The embedding: a code of signs for each token. The head's row of a token: the code of the
    token that it follows, zeros where it follows none; half of it where it is a draft's second
    likeliest."""
    shape = SHAPES[recipe.shape]
    codes = torch.empty((shape.vocab, shape.hidden), dtype=torch.bfloat16)
    for rows in codes.split(max(1, CHUNK // shape.hidden)):
        rows.copy_(torch.randint(0, 2, rows.shape, generator=generator) * 2 - 1)
    head = torch.zeros_like(codes)
    for factor, follows in base_shares(recipe.documents()[CONFIG_FILE]["planted"]):
        tokens = np.flatnonzero(follows >= 0)
        head[torch.from_numpy(follows[tokens])] += factor * codes[torch.from_numpy(tokens)]
    tensors = {
        "model.embed_tokens.weight": codes,
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        f"{HEAD}.weight": head,
    }
    if recipe.scheme is not None and recipe.is_quantized(HEAD):
        tensors |= _stored(HEAD, *MAKERS[recipe.scheme.name].halves(head))
    return tensors


def _stored(module: str, weight: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        f"{module}.weight": weight,
        f"{module}.weight_scale": scale,
        f"{module}.input_scale": torch.tensor(SCALE),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--target", choices=SHAPES, help="shape of OUTPUT_DIR/target")
    parser.add_argument("--draft", choices=SHAPES, help="shape of OUTPUT_DIR/draft")
    parser.add_argument("--acceptance", type=float, default=STANDARD_ACCEPTANCE)
    qformats = [scheme.qformat for scheme in quantized_schemes()]
    parser.add_argument("--quantization", choices=[*qformats, "none"], default="fp8")
    parser.add_argument(
        "--quantized-head", action="store_true", help="the output projection in the same format"
    )
    parser.add_argument("--seed", type=int, default=0, help="the same for a target and its draft")
    parser.add_argument("--config-only", action="store_true", help="no weights, no tokenizer")
    parser.add_argument("--tokenizer-dir", type=Path, default=REPOSITORY / "examples/demo-target")
    arguments = parser.parse_args()
    shapes = {"target": arguments.target, "draft": arguments.draft}
    if not any(shapes.values()):
        parser.error("nothing to write: give --target, --draft or both")
    for role in ROLES:
        if shapes[role] is None:
            continue
        recipe = Recipe(
            shapes[role],
            role,
            arguments.acceptance,
            arguments.seed,
            None if arguments.quantization == "none" else arguments.quantization,
            arguments.quantized_head,
        )
        write_checkpoint(
            arguments.output_dir / role,
            recipe,
            config_only=arguments.config_only,
            tokenizer_dir=arguments.tokenizer_dir,
            on_shard=lambda name, role=role: print(f"{role}/{name}", flush=True),
        )


if __name__ == "__main__":
    main()
