"""The file format of an engine: one safetensors container, written as a stream and read by mapping.

Layout: 8 bytes little-endian header length, JSON header padded with spaces so that data starts on a
64-byte boundary, then the tensors without gaps (the format allows none). Tensors whose size is a
multiple of 64 come first, the others after them by decreasing element size, so every tensor is
aligned for its dtype and nearly every one for vector loads. The safetensors library can read it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.builder.validation import strict_json
from llmctl.errors import CorruptEngine

if TYPE_CHECKING:
    import torch

ALIGNMENT = 64
METADATA = "__metadata__"  # the key of a header that is no tensor
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
DTYPES = {  # torch name -> (safetensors name, bytes an element)
    "float32": ("F32", 4),
    "bfloat16": ("BF16", 2),
    "float16": ("F16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "int8": ("I8", 1),
    "int32": ("I32", 4),
    "uint8": ("U8", 1),
}
_FIX = "build the engine again"
_TORCH_NAMES = {stored: name for name, (stored, _) in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a container. dtype is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return math.prod(self.shape) * DTYPES[self.dtype][1]


def layout(entries: Iterable[Entry]) -> list[Entry]:
    """The order in the file: multiples of 64 bytes first, then by falling element size."""
    return sorted(entries, key=lambda e: (e.num_bytes % ALIGNMENT != 0, -DTYPES[e.dtype][1]))


def encode_header(ordered: Iterable[Entry], metadata: Mapping[str, str]) -> bytes:
    """The length field and the padded JSON header."""
    header: dict[str, Any] = {METADATA: dict(metadata)}
    offset = 0
    for entry in ordered:
        header[entry.name] = _described(entry, offset)
        offset += entry.num_bytes
    text = json.dumps(header, allow_nan=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    assert len(text) <= MAX_HEADER_BYTES
    return len(text).to_bytes(8, "little") + text


def write_container(
    path: Path,
    entries: Iterable[Entry],
    metadata: Mapping[str, str],
    chunks: Callable[[str], Iterator[torch.Tensor]],
    on_progress: Callable[[int], None],
) -> tuple[int, str]:
    """Write the file, asking `chunks(name)` for each tensor's values in turn.

    Returns (bytes written, sha256 of the header). on_progress gets the bytes of the
    header and of each chunk.
    """
    ordered = layout(entries)
    header = encode_header(ordered, metadata)
    total = len(header)
    with path.open("wb") as file:
        file.write(header)
        on_progress(len(header))
        for entry in ordered:
            written = 0
            for chunk in chunks(entry.name):
                written += file.write(_bytes_of(chunk))
                on_progress(chunk.numel() * chunk.element_size())
            assert written == entry.num_bytes, f"{entry.name}: {written} of {entry.num_bytes} bytes"
            total += written
    return total, sha256(header).hexdigest()


def _bytes_of(chunk: torch.Tensor) -> memoryview:
    import torch

    flat = chunk.detach().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read_container_header(path: Path) -> tuple[bytes, dict[str, Any]]:
    """(the raw header with its length field, the parsed JSON). Raises CorruptEngine."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        is_aligned = length % 8 == 0  # for every element
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES) or not is_aligned:
            raise corrupt(path, f"its {size} bytes cannot hold a header of {length}")
        raw = file.read(length)
    try:
        header = strict_json.parse(raw)
        ends = (int(e["data_offsets"][1]) for n, e in header.items() if n != METADATA)
        end = max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise corrupt(path, f"its header is not valid: {error}") from error
    if 8 + length + end != size:
        raise corrupt(path, f"it has {size} bytes, its header describes {8 + length + end}")
    return prefix + raw, header


def check_entries(header: Mapping[str, Any], entries: Iterable[Entry]) -> None:
    """Raise CorruptEngine where a header does not have these tensors, each where `layout` puts it:
    without gaps or overlaps, and nothing else."""
    ordered = layout(entries)
    if len({entry.name for entry in ordered} - {METADATA}) != len(ordered):
        raise CorruptEngine("two of its tensors have one name", fix=_FIX)
    offset = 0
    for entry in ordered:
        end = offset + entry.num_bytes
        found = header.get(entry.name)
        if found is None:
            raise CorruptEngine(f"its plan needs {entry.name}, which is not there", fix=_FIX)
        if not _is_same(found, _described(entry, offset)):
            raise CorruptEngine(
                f"{entry.name} is {_shown(found)}, its plan says {entry.dtype} "
                f"{list(entry.shape)} at [{offset}, {end}]",
                fix=_FIX,
            )
        offset = end
    if len(header) != len(ordered) + 1:
        names = {METADATA, *(entry.name for entry in ordered)}
        odd = next(name for name in header if name not in names)
        raise CorruptEngine(f"it has a tensor {odd!r}, which its plan does not use", fix=_FIX)


def map_container(
    path: Path, header: Mapping[str, Any], data_start: int
) -> dict[str, torch.Tensor]:
    """Every tensor as a view of one private map of the file: nothing is read until it is used.
    `check_entries` has passed the header."""
    import torch

    storage = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    tensors = {}
    for name, (begin, end) in byte_ranges(header, data_start).items():
        dtype: torch.dtype = getattr(torch, _TORCH_NAMES[header[name]["dtype"]])
        tensors[name] = storage[begin:end].view(dtype).view(header[name]["shape"])
    return tensors


def byte_ranges(header: Mapping[str, Any], data_start: int) -> dict[str, tuple[int, int]]:
    """Where each tensor's bytes are in the file. `check_entries` has passed the header."""
    return {
        name: (data_start + entry["data_offsets"][0], data_start + entry["data_offsets"][1])
        for name, entry in header.items()
        if name != METADATA
    }


def _is_same(found: Any, wanted: Mapping[str, Any]) -> bool:
    """JSON alone makes no difference between 1, 1.0 and true."""
    if found != wanted:
        return False
    return all(type(size) is int for size in (*found["shape"], *found["data_offsets"]))


def _described(entry: Entry, offset: int) -> dict[str, Any]:
    """An entry as headers have it."""
    return {
        "dtype": DTYPES[entry.dtype][0],
        "shape": list(entry.shape),
        "data_offsets": [offset, offset + entry.num_bytes],
    }


def _shown(found: Any) -> str:
    """What a header says of a tensor, in our words where it has any."""
    try:
        dtype = _TORCH_NAMES.get(found["dtype"], found["dtype"])
        return f"{dtype} {found['shape']} at {found['data_offsets']}"
    except (KeyError, TypeError):
        return f"{found!r:.60}"


def corrupt(path: Path, what: str) -> CorruptEngine:
    """The error for a damaged engine file."""
    return CorruptEngine(f"{path} is not a whole engine: {what}", fix=_FIX)
