"""A checkpoint folder nobody vouches for: every defect has its own error, before any weight."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from llmctl import errors
from llmctl.quantize.checkpoint import Checkpoint, read_header
from llmctl.quantize.families import read_model

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.tensor(2.5),
    "d": torch.zeros(0, 3),
    "e": torch.tensor([1.0, -448.0, 0.25]).to(torch.float8_e4m3fn),
}


def with_header(path: Path, header: Any, data: bytes) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_reading_gives_the_values_that_were_saved(raw_checkpoint: Callable[..., Path]) -> None:
    checkpoint = Checkpoint.open(raw_checkpoint(TENSORS))
    assert checkpoint.tensors.keys() == TENSORS.keys()
    for name, wanted in TENSORS.items():
        found = checkpoint.read(name)
        assert found.dtype == wanted.dtype and found.shape == wanted.shape
        assert torch.equal(found.float(), wanted.float())


def test_writing_into_a_read_tensor_leaves_the_file_alone(
    raw_checkpoint: Callable[..., Path],
) -> None:
    checkpoint = Checkpoint.open(raw_checkpoint(TENSORS))
    checkpoint.read("a").fill_(9)
    checkpoint.release()
    assert torch.equal(checkpoint.read("a"), TENSORS["a"])


def test_tensors_outlive_the_release_of_their_maps(raw_checkpoint: Callable[..., Path]) -> None:
    checkpoint = Checkpoint.open(raw_checkpoint(TENSORS))
    tensor = checkpoint.read("a")
    checkpoint.release()
    assert torch.equal(tensor, TENSORS["a"])


def test_a_misaligned_tensor_is_read_into_aligned_memory(tmp_path: Path) -> None:
    header = {"x": entry([3], 0, 3, "U8"), "y": entry([2], 3, 11)}
    with_header(tmp_path / "model.safetensors", header, b"abc" + struct.pack("<2f", 1.5, -2.5))
    (tmp_path / "config.json").write_text("{}")
    found = Checkpoint.open(tmp_path).read("y")
    assert found.tolist() == [1.5, -2.5] and found.data_ptr() % 4 == 0


def test_every_truncation_is_a_corrupt_file(tmp_path: Path) -> None:
    path = tmp_path / "whole.safetensors"
    save_file(TENSORS, path)
    whole = path.read_bytes()
    short = tmp_path / "short.safetensors"
    for length in range(len(whole)):
        short.write_bytes(whole[:length])
        with pytest.raises(errors.CorruptFile):
            read_header(short)
    short.write_bytes(whole + b"\0")
    with pytest.raises(errors.CorruptFile, match="describes"):
        read_header(short)


@pytest.mark.parametrize(
    ("header", "data", "what"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "overlaps"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, "gap"),
        ({"a": entry([2], 0, 4)}, 4, "8 bytes, stored 4"),
        ({"a": entry([-1, -2], 0, 8)}, 8, "shape"),
        ({"a": entry([1 << 70], 0, 8)}, 8, "shape"),
        ({"a": entry([True, 2], 0, 8)}, 8, "shape"),
        ({"a": entry([2], 0, 8, "F99")}, 8, "dtype 'F99'"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "lacks"),
        ({"a": 7}, 8, "lacks"),
        (b'{"a": 1, "a": 2}', 0, "occurs twice"),
        (b'{"a": NaN}', 0, "NaN"),
        (b"[]", 0, "object"),
        (b"\xff\xff", 0, "JSON"),
        (b"[" * 100_000, 0, "JSON"),
    ],
)
def test_a_header_that_contradicts_itself_is_a_corrupt_file(
    tmp_path: Path, header: Any, data: int, what: str
) -> None:
    path = with_header(tmp_path / "x.safetensors", header, bytes(data))
    with pytest.raises(errors.CorruptFile, match=what):
        read_header(path)


def test_a_header_longer_than_its_file_is_not_allocated(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(errors.CorruptFile):
        read_header(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 400), st.integers(0, 255))
def test_a_flipped_byte_either_reads_or_is_a_corrupt_file(
    tmp_path: Path, position: int, value: int
) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    data = bytearray(path.read_bytes())
    data[position % len(data)] = value
    path.write_bytes(data)
    (tmp_path / "config.json").write_text("{}")
    try:
        checkpoint = Checkpoint.open(tmp_path)
    except errors.CorruptFile:
        return
    for name in checkpoint.tensors:
        checkpoint.read(name)


def write_sharded(folder: Path, weight_map: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": TENSORS["a"]}, folder / "model-1.safetensors")
    save_file({"b": TENSORS["b"]}, folder / "model-2.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_an_indexed_checkpoint_reads_from_its_shards(tmp_path: Path) -> None:
    folder = write_sharded(tmp_path / "m", {"a": "model-1.safetensors", "b": "model-2.safetensors"})
    checkpoint = Checkpoint.open(folder)
    assert torch.equal(checkpoint.read("b"), TENSORS["b"])


@pytest.mark.parametrize(
    "shard",
    [
        "../other/model-1.safetensors",
        "/etc/model-1.safetensors",
        "sub/model-1.safetensors",
        "..\\model-1.safetensors",
        "./model-1.safetensors",
        "/etc/passwd",
    ],
)
def test_an_index_that_points_outside_its_folder_is_unsafe(tmp_path: Path, shard: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    save_file({"a": TENSORS["a"]}, other / "model-1.safetensors")
    with pytest.raises(errors.UnsafePath, match="same folder"):
        Checkpoint.open(write_sharded(tmp_path / "m", {"a": shard}))


def test_links_as_in_the_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    blobs = tmp_path / "blobs"
    blobs.mkdir()
    save_file(TENSORS, blobs / "0123abcd")
    folder = tmp_path / "snapshot"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").symlink_to("../blobs/0123abcd")
    assert Checkpoint.open(folder).info("a").shape == (3, 4)


@pytest.mark.parametrize(
    ("weight_map", "error"),
    [
        ({"a": "model-3.safetensors"}, errors.MissingTensor),
        ({"a": "model-2.safetensors"}, errors.MissingTensor),
        ({"a": "model-1.bin"}, errors.CorruptFile),
        ({"a": 3}, errors.CorruptFile),
        ({}, errors.CorruptFile),
    ],
)
def test_an_index_that_does_not_fit_its_shards_is_refused(
    tmp_path: Path, weight_map: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error):
        Checkpoint.open(write_sharded(tmp_path / "m", weight_map))


def test_a_pickle_only_checkpoint_is_never_opened(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
    with pytest.raises(errors.PickleCheckpoint, match="never unpickles"):
        Checkpoint.open(tmp_path)


def test_folders_without_config_or_weights_are_not_found(tmp_path: Path) -> None:
    with pytest.raises(errors.CheckpointNotFound, match="config.json"):
        Checkpoint.open(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(errors.CheckpointNotFound, match="neither.*index.json$"):
        Checkpoint.open(tmp_path)
    (tmp_path / "rank0.engine").touch()
    with pytest.raises(errors.CheckpointNotFound, match="is an engine directory"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"a": NaN}', '{"a": 1e999}', '{"a": 1, "a": 2}', "{", "[1]", '{"a": "\udcff"}']
)
def test_a_config_that_is_not_strict_json_is_corrupt(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(errors.CorruptFile):
        Checkpoint.open(tmp_path)


# ---- what config.json implies ----


def test_a_missing_tensor_is_named(editable: Callable[..., Path]) -> None:
    folder = editable(lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(errors.MissingTensor, match="layers.1.mlp.up_proj.weight"):
        read_model(Checkpoint.open(folder))


def test_a_misshapen_tensor_is_named_with_both_shapes(editable: Callable[..., Path]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.self_attn.k_proj.weight"
        tensors[name] = tensors[name].T.contiguous()

    with pytest.raises(errors.BadTensorShape, match=r"k_proj.*\[96, 48\].*\[48, 96\]"):
        read_model(Checkpoint.open(editable(change)))


def test_a_tensor_the_config_does_not_imply_is_refused(editable: Callable[..., Path]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.q_proj.bias"] = torch.ones(96, dtype=torch.bfloat16)

    with pytest.raises(errors.UnexpectedTensor, match="q_proj.bias"):
        read_model(Checkpoint.open(editable(change)))


def test_derived_tensors_of_old_checkpoints_are_ignored(editable: Callable[..., Path]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(12)

    assert read_model(Checkpoint.open(editable(change))).num_layers == 2


@pytest.mark.parametrize(
    "names",
    [["GPT2LMHeadModel"], [], None, "LlamaForCausalLM", [3], ["LlamaForCausalLM", "Other"]],
)
def test_an_unknown_architecture_lists_the_known(
    raw_checkpoint: Callable[..., Path], names: Any
) -> None:
    folder = raw_checkpoint(TENSORS, {"architectures": names})
    with pytest.raises(errors.UnknownArchitecture, match="LlamaForCausalLM, Mistral") as refused:
        read_model(Checkpoint.open(folder))
    assert refused.value.fix


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", True),
        ("hidden_size", "many"),
        ("hidden_size", 97),
        ("num_attention_heads", 0),
        ("hidden_act", "nonsense"),
        ("rope_scaling", {"rope_type": "nonsense", "factor": 2.0}),
        ("num_attention_heads", 5),  # of which transformers says several lines
    ],
)
def test_a_config_that_describes_no_model_is_corrupt(
    editable: Callable[..., Path], key: str, value: Any
) -> None:
    folder = editable(lambda tensors: None)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {key: value}))
    with pytest.raises(errors.CorruptFile, match="config.json") as refused:
        read_model(Checkpoint.open(folder))
    assert "\n" not in str(refused.value)
