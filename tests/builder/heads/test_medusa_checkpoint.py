"""Published Medusa heads: what is read, and what is refused before a weight is read."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.hostile import bounded
from support.medusa import make_heads, save_heads, torch_heads

from llmctl.builder.heads.medusa.checkpoint import open_heads, require_fit
from llmctl.errors import (
    BadConfig,
    BadTensorShape,
    CheckpointNotFound,
    CorruptFile,
    MissingTensor,
    PairMismatch,
    PickleCheckpoint,
    UnexpectedTensor,
    Unsupported,
)
from llmctl.quantize.checkpoint import Checkpoint
from llmctl.quantize.format import QuantizationInfo

TARGET = Checkpoint(Path("target"), {}, {}, None)
SIZES = (3, 1, 64, 256)


def pickled(folder: Path, content: object, **options: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / "medusa_lm_head.pt", **options)
    return folder


@pytest.mark.parametrize("num_layers", [0, 1, 2])
def test_names_say_how_many_heads_and_blocks_there_are(tmp_path: Path, num_layers: int):
    tensors = make_heads(3, num_layers, 64, 256)
    heads = open_heads(save_heads(tmp_path / "heads", tensors), TARGET)
    assert (heads.num_heads, heads.num_layers) == (3, num_layers)
    assert (heads.hidden_size, heads.vocab_size) == (64, 256)
    beside = heads.beside(TARGET, 3)
    assert len(beside.tensors) == len(tensors) and not TARGET.tensors
    for name, tensor in tensors.items():
        assert torch.equal(beside.read(f"medusa_head.{name}"), tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_pickled_state_dict_is_read_as_tensors_alone(tmp_path: Path, dtype: torch.dtype):
    tensors = make_heads(*SIZES)
    modules = torch_heads(tensors).to(dtype)
    folder = pickled(tmp_path / "heads", modules.state_dict())
    heads = open_heads(folder, TARGET)
    assert (heads.num_heads, heads.num_layers, heads.hidden_size, heads.vocab_size) == SIZES
    beside = heads.beside(TARGET, 3)
    for name, tensor in tensors.items():
        assert torch.equal(beside.read(f"medusa_head.{name}"), tensor.to(dtype))


def test_fewer_heads_may_be_taken(tmp_path: Path):
    heads = open_heads(save_heads(tmp_path / "heads", make_heads(*SIZES)), TARGET)
    taken = heads.beside(TARGET, 2).tensors
    assert {name.split(".")[1] for name in taken} == {"0", "1"} and len(taken) == 6


def test_heads_beside_a_quantized_target_are_not_quantized(tmp_path: Path):
    info = QuantizationInfo("modelopt", "FP8", None, ("lm_head",), "tensor", "static")
    heads = open_heads(save_heads(tmp_path / "heads", make_heads(*SIZES)), TARGET)
    beside = heads.beside(Checkpoint(Path("target"), {}, {}, info), 3).quantization
    assert beside is not None and beside.excludes("medusa_head.0.0.linear")
    assert beside.excludes("lm_head") and not beside.excludes("model.layers.0.mlp.up_proj")


def test_the_safe_file_wins(tmp_path: Path):
    folder = save_heads(tmp_path / "heads", make_heads(2, 1, 64, 256))
    pickled(folder, make_heads(*SIZES))
    assert open_heads(folder, TARGET).num_heads == 2


def test_heads_of_a_whole_model_are_found_in_it(tmp_path: Path):
    tensors = make_heads(*SIZES)
    (tmp_path / "config.json").write_text("{}")
    stored = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    save_file({**stored, "model.norm.weight": torch.ones(64)}, tmp_path / "model.safetensors")
    heads = open_heads(None, Checkpoint.open(tmp_path))
    assert (heads.num_heads, heads.num_layers, heads.hidden_size, heads.vocab_size) == SIZES
    beside = heads.beside(Checkpoint.open(tmp_path), 2)
    for name, tensor in stored.items():
        assert torch.equal(beside.read(name), tensor)


def test_a_target_without_heads_and_no_folder_is_refused():
    with pytest.raises(BadConfig, match="target holds no medusa_head") as error:
        open_heads(None, TARGET)
    assert "--draft-model-dir" in error.value.fix


def test_a_folder_without_heads_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointNotFound, match=r"neither medusa_lm_head.safetensors nor .*\.pt"):
        open_heads(tmp_path, TARGET)


class Evil:
    """What a pickle can do: call anything when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return (shutil.rmtree, (self.path,))


def test_no_code_of_a_pickle_runs(tmp_path: Path):
    victim = tmp_path / "victim"
    victim.mkdir()
    for index, content in enumerate(({"0.0.weight": Evil(victim)}, Evil(victim))):
        folder = pickled(tmp_path / str(index), content)
        with pytest.raises(PickleCheckpoint, match="not read it as tensors alone") as error:
            open_heads(folder, TARGET)
        assert "weights_only=False" in error.value.fix
        assert victim.is_dir()


def test_the_offered_conversion_gives_what_is_read(tmp_path: Path, monkeypatch):
    """The fix of the error, run as it stands on a file that only a trusting reader takes."""
    tensors = make_heads(*SIZES)
    folder = pickled(tmp_path / "heads", tensors, _use_new_zipfile_serialization=False)
    with pytest.raises(PickleCheckpoint) as error:
        open_heads(folder, TARGET)
    command = error.value.fix.split('python -c "')[1].rstrip('"')
    monkeypatch.chdir(folder)
    exec(command, {})
    converted = load_file(folder / "medusa_lm_head.safetensors")
    assert converted.keys() == tensors.keys()
    assert open_heads(folder, TARGET).num_heads == 3


@pytest.mark.parametrize(
    "content",
    [
        [torch.ones(2)],
        {},
        {0: torch.ones(2)},
        {"0.0.weight": 3},
        {"0.0.weight": torch.ones(2, 2).to_sparse()},
        {"state_dict": {"0.0.weight": torch.ones(2, 2)}},
    ],
    ids=["list", "nothing", "number as name", "number", "sparse", "nested"],
)
def test_a_pickle_of_something_else_is_refused(tmp_path: Path, content: object):
    with pytest.raises(PickleCheckpoint, match="is refused"):
        open_heads(pickled(tmp_path, content), TARGET)


# A pickle of a dictionary whose key has one tuple twice, which has one tuple twice, ..., 60 times.
_TWICE = b"\x80\x02})" + b"q\0h\0\x86" * 60 + b"K\1s."
_BYTES = b"\x80\x02cbuiltins\nbytearray\n\x8a\5" + (1 << 38).to_bytes(5, "little") + b"\x85R."
_NESTED = b"\x80\x02})" + b"\x85" * 500_000 + b"K\1s."


@pytest.mark.parametrize(
    ("pickled_bytes", "found"),
    [
        (_TWICE, "one tuple in two places"),
        (_TWICE.replace(b"q", b"\x80\x02q"), "the operation PROTO"),
        (_NESTED, "500001 tuples"),
        (_BYTES, "names 'builtins bytearray'"),
        (b"\x80\x02)2\x86.", "the operation DUP"),
        (b"\x80\x02X\0\0\0\1" + b" " * (1 << 24) + b".", "records are compressed"),
        (b"\x80\x02X\0\0\0\1" + b" " * (1 << 24) + b".", "its pickle has 16777224 bytes"),
    ],
    ids=["hash", "prefix", "nested", "bytearray", "stack", "compressed", "long"],
)
def test_a_pickle_that_takes_time_or_memory_without_end_is_refused(
    tmp_path: Path, pickled_bytes: bytes, found: str
):
    path = pickled(tmp_path, make_heads(*SIZES)) / "medusa_lm_head.pt"
    with zipfile.ZipFile(path) as source:
        records = {name: source.read(name) for name in source.namelist()}
    form = zipfile.ZIP_DEFLATED if "compressed" in found else zipfile.ZIP_STORED
    with zipfile.ZipFile(path, "w", form) as target:
        for name, content in records.items():
            target.writestr(name, pickled_bytes if name.endswith("data.pkl") else content)
    with bounded(), pytest.raises(PickleCheckpoint, match=found):
        open_heads(tmp_path, TARGET)


def test_a_pickled_tensor_of_more_values_than_it_stores_is_refused(tmp_path: Path):
    content = {"0.0.weight": torch.ones(1).expand(1 << 40)}
    with pytest.raises(PickleCheckpoint, match="than it stores"):
        open_heads(pickled(tmp_path, content), TARGET)


@pytest.mark.parametrize("length", [0, 10, 500, -1])
def test_a_damaged_pickle_is_refused(tmp_path: Path, length: int):
    path = pickled(tmp_path, make_heads(*SIZES)) / "medusa_lm_head.pt"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(PickleCheckpoint, match="is refused"):
        open_heads(tmp_path, TARGET)


def test_a_damaged_safe_file_is_refused(tmp_path: Path):
    path = save_heads(tmp_path, make_heads(*SIZES)) / "medusa_lm_head.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptFile):
        open_heads(tmp_path, TARGET)


def test_a_legacy_pickle_is_refused(tmp_path: Path):
    (tmp_path / "medusa_lm_head.pt").write_bytes(pickle.dumps({"0.0.weight": [1.0]}))
    with pytest.raises(PickleCheckpoint):
        open_heads(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("change", "error", "found"),
    [
        (lambda t: t.pop("1.0.linear.bias"), MissingTensor, "lacks 1 of the 9 tensors of 3 heads"),
        (lambda t: t.pop("2.1.weight"), MissingTensor, "2.1.weight"),
        (lambda t: [t.pop(n) for n in list(t) if n[0] == "1"], MissingTensor, "lacks 3 of the 9"),
        (lambda t: t.update({"0.attn.weight": torch.ones(2)}), UnexpectedTensor, "0.attn.weight"),
        (lambda t: t.update({"lm_head.weight": torch.ones(2)}), UnexpectedTensor, "lm_head"),
        (lambda t: [t.pop(f"{m}.1.weight") for m in range(2)], MissingTensor, "lacks 2 of the 9"),
        (
            lambda t: t.update({"0.1.weight": t["0.1.weight"].to(torch.float8_e4m3fn)}),
            Unsupported,
            "0.1.weight in .* is F8_E4M3",
        ),
        (
            lambda t: t.update({"1.0.linear.weight": torch.ones(64, 32)}),
            BadTensorShape,
            r"1.0.linear.weight .* has shape \[64, 32\]; the other heads imply \[64, 64\]",
        ),
        (lambda t: t.update({"2.1.weight": torch.ones(255, 64)}), BadTensorShape, r"\[256, 64\]"),
        (lambda t: t.update({"0.1.weight": torch.ones(64)}), BadTensorShape, "is wanted"),
    ],
)
@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_heads_that_are_not_whole_are_refused(tmp_path: Path, change, error, found, kind):
    tensors = make_heads(*SIZES)
    change(tensors)
    folder = save_heads(tmp_path, tensors) if kind == "safetensors" else pickled(tmp_path, tensors)
    with pytest.raises(error, match=found):
        open_heads(folder, TARGET)


@pytest.mark.parametrize(
    ("sizes", "found"),
    [((32, 256), "hidden_size 64, the target has 32"), ((64, 255), "vocab_size 256, the target")],
)
def test_heads_of_another_target_are_refused(tmp_path: Path, sizes, found):
    heads = open_heads(save_heads(tmp_path, make_heads(*SIZES)), TARGET)
    require_fit(heads, 64, 256)
    with pytest.raises(PairMismatch, match=found):
        require_fit(heads, *sizes)
