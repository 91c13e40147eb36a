"""Write a Hugging Face checkpoint of a known shape with random weights, to measure speed on.

    python -m scripts.models.make_random_checkpoint OUTPUT_DIR --shape 1b [--quantization fp8]

The text such a model writes means nothing; time and memory are those of the real shape. The
tokenizer is copied from --tokenizer-dir (the demo target by default): its ids are valid in any of
these vocabularies. FP8 writes the ModelOpt unified layout with plausible static scales.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parents[2]

# hidden, intermediate, layers, heads, kv heads, head size, vocabulary, tied embeddings
SHAPES = {
    "tiny": (256, 512, 2, 4, 2, 64, 4096, True),
    "1b": (2048, 8192, 16, 32, 8, 64, 128256, True),  # Llama-3.2-1B
    "3b": (3072, 8192, 28, 24, 8, 128, 128256, True),  # Llama-3.2-3B
}
FP8_MAX = 448.0


def config_json(shape: str) -> dict[str, object]:
    """config.json of a Llama of that shape, without RoPE scaling."""
    hidden, intermediate, layers, heads, kv_heads, head_size, vocab, tied = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_size,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }


def linear_shapes(shape: str) -> dict[str, tuple[int, int]]:
    """[out, in] of every linear layer of one decoder layer."""
    hidden, intermediate, _, heads, kv_heads, head_size, _, _ = SHAPES[shape]
    return {
        "self_attn.q_proj": (heads * head_size, hidden),
        "self_attn.k_proj": (kv_heads * head_size, hidden),
        "self_attn.v_proj": (kv_heads * head_size, hidden),
        "self_attn.o_proj": (hidden, heads * head_size),
        "mlp.gate_proj": (intermediate, hidden),
        "mlp.up_proj": (intermediate, hidden),
        "mlp.down_proj": (hidden, intermediate),
    }


def random_weight(shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """bfloat16 [out, in], scaled so that activations keep their size through a layer."""
    weight = torch.randn(shape, generator=generator) * shape[1] ** -0.5
    return weight.bfloat16()


def layer_tensors(
    shape: str, index: int, quantization: str, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """All tensors of decoder layer `index` under their checkpoint names."""
    hidden = SHAPES[shape][0]
    prefix = f"model.layers.{index}."
    tensors = {
        prefix + "input_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        prefix + "post_attention_layernorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
    }
    for name, dims in linear_shapes(shape).items():
        weight = random_weight(dims, generator)
        if quantization == "fp8":
            scale = weight.abs().max().float() / FP8_MAX
            tensors[prefix + name + ".weight_scale"] = scale
            tensors[prefix + name + ".input_scale"] = torch.tensor(8.0 / FP8_MAX)
            weight = (weight / scale).to(torch.float8_e4m3fn)
        tensors[prefix + name + ".weight"] = weight
    if quantization == "fp8":
        tensors[prefix + "self_attn.k_proj.k_scale"] = torch.tensor(8.0 / FP8_MAX)
        tensors[prefix + "self_attn.v_proj.v_scale"] = torch.tensor(8.0 / FP8_MAX)
    return tensors


def write_checkpoint(
    output_dir: Path, shape: str, quantization: str, tokenizer_dir: Path, seed: int = 0
) -> None:
    """One safetensors shard per layer, an index, config and tokenizer files."""
    output_dir.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    config = config_json(shape)
    hidden, layers, vocab = SHAPES[shape][0], SHAPES[shape][2], SHAPES[shape][6]
    if quantization == "fp8":
        number = {"dynamic": False, "num_bits": 8, "type": "float"}
        config["quantization_config"] = {
            "quant_method": "modelopt",
            "quant_algo": "FP8",
            "ignore": ["lm_head", "model.embed_tokens"],
            "kv_cache_scheme": number,
            "config_groups": {
                "group_0": {"targets": ["Linear"], "weights": number, "input_activations": number}
            },
        }
    weight_map: dict[str, str] = {}

    def write_shard(file_name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, output_dir / file_name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, file_name))

    for index in range(layers):
        write_shard(
            f"layer-{index:03d}.safetensors", layer_tensors(shape, index, quantization, generator)
        )
    write_shard(
        "outer.safetensors",
        {
            "model.embed_tokens.weight": random_weight((vocab, hidden), generator),
            "model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16),
        },
    )
    index_json = {"metadata": {}, "weight_map": weight_map}
    (output_dir / "model.safetensors.index.json").write_text(json.dumps(index_json))
    (output_dir / "config.json").write_text(json.dumps(config, indent=2))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_dir / name, output_dir / name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="1b")
    parser.add_argument("--quantization", choices=["none", "fp8"], default="none")
    parser.add_argument("--tokenizer-dir", type=Path, default=REPOSITORY / "examples/demo-target")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_checkpoint(
        arguments.output_dir,
        arguments.shape,
        arguments.quantization,
        arguments.tokenizer_dir,
        arguments.seed,
    )


if __name__ == "__main__":
    main()
