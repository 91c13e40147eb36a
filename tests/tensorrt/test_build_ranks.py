"""Tensor-parallel TensorRT engines: shards of the weights, sums over the ranks inside the plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.tensorrt.build import compile_engine, plan_engine, profile_kernels, write_config
from support.tensorrt.checkpoints import write_checkpoint

from llmctl.errors import Unsupported

LIMITS = {"max_batch_size": 16, "max_seq_len": 1024, "max_num_tokens": 512}
SMALL = {"max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 64}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 128}


def test_every_rank_sums_twice_a_layer(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "fp8")
    _, pieces = compile_engine(folder, **LIMITS, tp_size=4)
    counts = {"first": 0, "middle": 2, "last": 2}
    for name, piece in pieces.items():
        for profile, layers in profile_kernels(piece):
            sums = [layer for layer in layers if layer["kind"] == "comm_allreduce"]
            assert len(sums) == counts[name], (name, profile["name"])


def test_a_whole_model_of_a_rank_is_built(tmp_path: Path) -> None:
    folder = write_config(tmp_path, "fp8", num_hidden_layers=2)
    continuous = {"kv_cache_type": "continuous", "kv_cache_dtype": "none"}
    engine, pieces = compile_engine(folder, **LIMITS, **continuous, tp_size=2, max_draft_len=2)
    caches = [b for b in pieces["whole"].bindings if b["name"] == "cache_k_0"]
    assert caches[0]["shape"][1] == engine.plan.kv_cache.num_kv_heads == 4
    for _, layers in profile_kernels(pieces["whole"]):
        assert sum(layer["kind"] == "comm_allreduce" for layer in layers) == 4


@pytest.mark.parametrize("form", ["bfloat16", "fp8", "fp8 per token"])
def test_the_shards_of_all_ranks_are_the_weights(form: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama tied, biased", form, **HEADS)
    whole, sharded = plan_engine(checkpoint, **SMALL), plan_engine(checkpoint, **SMALL, tp_size=2)
    size = 64  # of a head
    rows = {  # merged weight -> rows of each of its parts
        "qkv_proj": (8 * size, 4 * size, 4 * size),
        "gate_up_proj": (128, 128),
    }
    assert set(sharded.sources) == set(whole.sources)
    for name, source in whole.sources.items():
        wanted = torch.cat(list(source.chunks(whole.checkpoint)))
        parts = [torch.cat(list(sharded.sources[name].chunks(shard))) for shard in sharded.shards]
        module, kind = name.split(".")[-2:] if "." in name else ("", name)
        if module in rows and kind in ("weight", "bias", "weight_scale"):
            halves = [part.split([n // 2 for n in rows[module]]) for part in parts]
            found = torch.cat([half[i] for i in range(len(rows[module])) for half in halves])
        elif module in ("o_proj", "down_proj") and kind == "weight":
            found = torch.cat(parts, dim=1)
        else:
            found = parts[0]
            assert torch.equal(_bytes(parts[1]), _bytes(found)), name
        assert torch.equal(_bytes(found), _bytes(wanted)), name


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def test_a_bias_is_added_to_the_sum_once(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama tied, biased", "bfloat16", **HEADS)
    engine = plan_engine(checkpoint, **SMALL, tp_size=2)
    nodes = [node for piece in engine.pieces for node in piece.nodes]
    assert not [n for n in nodes if n.name.endswith(("o_proj", "down_proj")) and "bias" in n.inputs]
    sums = [node for node in nodes if node.op == "all_reduce"]
    assert sums and all("bias" in node.inputs for node in sums)


def test_parts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", "llama", "bfloat16")
    with pytest.raises(Unsupported, match="num_attention_heads is 4"):
        plan_engine(checkpoint, **SMALL, tp_size=3)
    threes = {"num_attention_heads": 12, "num_key_value_heads": 3}
    checkpoint = write_checkpoint(tmp_path / "3", "llama", "bfloat16", **threes)
    with pytest.raises(Unsupported, match="num_key_value_heads is 3"):
        plan_engine(checkpoint, **SMALL, tp_size=2)
