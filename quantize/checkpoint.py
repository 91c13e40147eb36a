"""Reading an untrusted Hugging Face checkpoint folder.

Headers of every safetensors file are checked before any weight is read: sizes, overlaps, names,
paths. Nothing is unpickled and no code of the checkpoint runs. Tensors are private maps of the
file, so reading one costs page cache and not memory until something writes to it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.errors import (
    BadTensorShape,
    CheckpointNotFound,
    CorruptFile,
    MissingTensor,
    PickleCheckpoint,
    UnsafePath,
)
from llmctl.quantize.format import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER_FILES,
    QuantizationInfo,
    has_file,
    parse_json,
    read_json,
    read_stated_quantization,
    shown,
)

if TYPE_CHECKING:
    import torch

# The safetensors names -> (torch name, bytes an element).
DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
MAX_NAME_BYTES = 255  # of a file, on every file system there is
MAX_DIMENSIONS = 8  # of a tensor; weights have two
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it. dtype is the safetensors name ("BF16")."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int  # bytes from the start of the file
    num_bytes: int


@dataclass(slots=True)
class Checkpoint:
    """An opened checkpoint folder: every header is valid, no weight has been read."""

    path: Path
    config: dict[str, Any]
    tensors: Mapping[str, TensorInfo]
    quantization: QuantizationInfo | None
    held: Mapping[str, torch.Tensor] = field(default_factory=dict)  # that no safetensors file has
    # by module: of heads that were added and are quantized in another way than the rest
    apart: Mapping[str, QuantizationInfo] = field(default_factory=dict)
    _maps: dict[Path, mmap.mmap] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Check the folder and its headers.

        Raises CheckpointNotFound, CorruptFile, UnsafePath, PickleCheckpoint, MissingTensor (a
        shard the index names is absent) or UnknownQuantization.
        """
        config_path = path / CONFIG_FILE
        if path.is_file():
            wanted = f"{path} is a file; a folder in Hugging Face format is wanted"
            raise CheckpointNotFound(wanted, fix=f"give {path.parent}")
        if not has_file(config_path):
            raise CheckpointNotFound(f"{config_path} does not exist")
        config = read_json(config_path)
        quantization = read_stated_quantization(path, config)
        return cls(path, config, _read_headers(path), quantization)

    def read(self, name: str) -> torch.Tensor:
        """The tensor on the CPU, in its stored dtype, mapped rather than copied where aligned.

        Writing into it changes this process's private pages, never the file. Raises MissingTensor.
        """
        import torch

        if name in self.held:
            return self.held[name]
        info = self.info(name)
        dtype = getattr(torch, DTYPES[info.dtype][0])
        if info.num_bytes == 0:
            return torch.empty(info.shape, dtype=dtype)
        source: Any = self._map(info.file)
        offset = info.offset
        if offset % DTYPES[info.dtype][1]:  # legal in the format, but torch wants alignment
            source, offset = bytearray(source[offset : offset + info.num_bytes]), 0
        count = math.prod(info.shape)
        return torch.frombuffer(source, dtype=dtype, count=count, offset=offset).view(info.shape)

    def quantization_of(self, name: str) -> QuantizationInfo | None:
        """The quantization that applies to a module, or to a tensor of one."""
        found = [info for module, info in self.apart.items() if name.startswith(f"{module}.")]
        return found[0] if found else self.quantization

    def info(self, name: str) -> TensorInfo:
        """The header entry of one tensor. Raises MissingTensor."""
        found = self.tensors.get(name)
        if found is None:
            raise MissingTensor(
                f"{self.path} has no tensor {name} ({len(self.tensors)} tensors are there)",
                fix="fetch the checkpoint again, or check that config.json belongs to it",
            )
        return found

    def require(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Check that the named tensors exist with these shapes.

        Raises MissingTensor (with every absent name) or BadTensorShape.
        """
        absent = [name for name in shapes if name not in self.tensors]
        if absent:
            shown = ", ".join(absent[:8]) + (" …" if len(absent) > 8 else "")
            raise MissingTensor(
                f"{self.path} lacks {len(absent)} of the {len(shapes)} tensors that config.json "
                f"promises: {shown}",
                fix="fetch the checkpoint again, or check that config.json belongs to it",
            )
        for name, wanted in shapes.items():
            found = self.tensors[name].shape
            if found != wanted:
                raise BadTensorShape(
                    f"{name} in {self.tensors[name].file} has shape {list(found)}; config.json "
                    f"implies {list(wanted)}",
                    fix="check that config.json belongs to these weights",
                )

    def release(self) -> None:
        """Forget the file maps: each is unmapped when the last tensor on it is dropped."""
        self._maps.clear()

    def tokenizer_files(self) -> list[Path]:
        """The tokenizer's files that exist in the folder."""
        return [self.path / name for name in TOKENIZER_FILES if has_file(self.path / name)]

    def _map(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with path.open("rb") as file:
                # A private map that reserves no swap: a 100 GB shard opens on a 16 GB machine.
                self._maps[path] = mmap.mmap(
                    file.fileno(),
                    0,
                    flags=mmap.MAP_PRIVATE | getattr(mmap, "MAP_NORESERVE", 0),
                    prot=mmap.PROT_READ | mmap.PROT_WRITE,
                )
        return self._maps[path]


def has_weights(folder: Path) -> bool:
    """Whether the folder has any, whatever their format and state."""
    suffixes = (".safetensors", *PICKLE_SUFFIXES)
    return any(p.suffix in suffixes or p.name == INDEX_FILE for p in folder.iterdir())


def _read_headers(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor the folder offers, found as transformers finds it: one file, or an index. Where
    both are there they must tell of the same tensors."""
    has_index = has_file(folder / INDEX_FILE)
    if has_file(folder / SINGLE_FILE):
        tensors = read_header(folder / SINGLE_FILE)
        indexed = _read_indexed(folder) if has_index else tensors
        if indexed != tensors:
            raise CorruptFile(
                f"{folder} has {SINGLE_FILE} with {len(tensors)} tensors and {INDEX_FILE} that "
                f"places {len(indexed)} elsewhere; one of the two is wanted",
                fix="remove the one that does not belong to this model",
            )
        return tensors
    if has_index:
        return _read_indexed(folder)
    pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
    if pickles and not any(folder.glob("*.safetensors")):
        raise PickleCheckpoint(
            f"{folder} has only pickle weights ({pickles[0]}); llmctl never unpickles",
            fix="convert it where you trust it: save_pretrained(..., safe_serialization=True)",
        )
    found = "".join(f"; it holds {p.name}" for p in sorted(folder.glob("*.safetensors"))[:1])
    found = "; it is an engine directory" if any(folder.glob("rank*.engine")) else found
    raise CheckpointNotFound(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}")


def _read_indexed(folder: Path) -> dict[str, TensorInfo]:
    index = folder / INDEX_FILE
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CorruptFile(f"{index} has no weight_map")
    headers: dict[str, dict[str, TensorInfo]] = {}
    tensors = {}
    for name, shard in weight_map.items():
        if not isinstance(shard, str):
            raise CorruptFile(f"{index} places {name} in {shown(shard)}; a file name is wanted")
        # A link of that name inside the folder is fine (the Hugging Face cache is made of them).
        is_name = shard == Path(shard).name and len(os.fsencode(shard)) <= MAX_NAME_BYTES
        if not is_name or "\\" in shard or "\0" in shard:
            raise UnsafePath(
                f"{index} places {name} in {shown(shard)}; only files of the same folder are read",
                fix="do not use this checkpoint unless you know who wrote the index",
            )
        if not shard.endswith(".safetensors"):
            raise CorruptFile(
                f"{index} places {name} in {shown(shard)}; a .safetensors name is wanted"
            )
        if shard not in headers:
            if not has_file(folder / shard):
                raise MissingTensor(
                    f"{index} places {name} in {shard}, which does not exist",
                    fix="fetch the missing shard",
                )
            headers[shard] = read_header(folder / shard)
        if name not in headers[shard]:
            raise MissingTensor(f"{index} places {name} in {shard}, which does not hold it")
        tensors[name] = headers[shard][name]
    return tensors


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, from its header alone. Raises CorruptFile."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_bytes = int.from_bytes(file.read(8), "little")
        if size < 8 or header_bytes > min(MAX_HEADER_BYTES, size - 8):
            raise _corrupt(path, f"its {size} bytes cannot hold a header of {header_bytes}")
        header = parse_json(file.read(header_bytes), f"the header of {path}")
    start = 8 + header_bytes
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(path, f"its __metadata__ is {shown(metadata)}; texts by name are wanted")
    tensors = {name: _entry(path, name, entry, start) for name, entry in header.items()}
    end = start
    for info in sorted(tensors.values(), key=lambda info: (info.offset, info.num_bytes)):
        if info.offset != end:
            what = "overlaps" if info.offset < end else "leaves a gap after"
            raise _corrupt(path, f"{info.name} {what} the tensor before it")
        end += info.num_bytes
    if end != size:
        raise _corrupt(path, f"it has {size} bytes, its header describes {end}")
    return tensors


def _entry(path: Path, name: str, entry: Any, start: int) -> TensorInfo:
    """Check one header entry against itself: dtype, shape, and the bytes it claims."""
    try:
        dtype, shape = entry["dtype"], entry["shape"]
        begin, end = entry["data_offsets"]
    except (TypeError, KeyError, ValueError) as error:
        raise _corrupt(path, f"the entry of {name} lacks dtype, shape or offsets") from error
    if not isinstance(shape, list):
        raise _corrupt(path, f"{name} has shape {shown(shape)}")
    numbers = [*shape, begin, end] if len(shape) <= MAX_DIMENSIONS else [-1]
    # bool is an int to Python and not a size to anyone else
    if not all(type(number) is int and 0 <= number < 1 << 62 for number in numbers):
        raise _corrupt(path, f"{name} has shape {shown(shape)} at {shown(begin)}, {shown(end)}")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _corrupt(path, f"{name} has dtype {shown(dtype)}; known: {', '.join(DTYPES)}")
    wanted = math.prod(shape) * DTYPES[dtype][1]
    if end - begin != wanted:
        raise _corrupt(path, f"{name} is {dtype} {shape}: {wanted} bytes, stored {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), path, start + begin, wanted)


def _corrupt(path: Path, what: str) -> CorruptFile:
    return CorruptFile(f"{path} is not a whole safetensors file: {what}", fix="fetch it again")
