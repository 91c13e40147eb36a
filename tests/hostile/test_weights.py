"""safetensors headers and index files of strangers."""

from __future__ import annotations

import copy
import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile import attempt, build, require_named, write
from support.mutations import Mutation, mutations

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"  # float32 [260, 32]
EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def parts(path: Path) -> tuple[dict[str, Any], bytes]:
    """(header, values) of a safetensors file."""
    data = path.read_bytes()
    size = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:size]), data[size:]


def join(header: Any, values: bytes, length: int | None = None) -> bytes:
    """A safetensors file, which may lie about the length of its header."""
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + values


def both(folder: Path) -> list[Any]:
    """What building and inspecting a folder come to."""
    return [build(folder, folder.parent / "engine"), attempt("inspect", folder, "--json")]


ENTRIES: list[tuple[Any, str]] = [
    ({"data_offsets": [-33280, 0]}, "at -33280, 0"),
    ({"data_offsets": [33280, 0]}, "33280 bytes, stored -33280"),
    ({"data_offsets": [0, 2**63]}, "at 0, 9223372036854775808"),
    ({"data_offsets": [0.0, 33280.0]}, "at 0.0, 33280.0"),
    ({"data_offsets": "ab"}, "at 'a', 'b'"),
    ({"data_offsets": [0, 1, 2]}, "lacks dtype, shape or offsets"),
    ({"data_offsets": None}, "lacks dtype, shape or offsets"),
    ({"dtype": "F4"}, "has dtype 'F4'; known: "),
    ({"dtype": ["F32"]}, "has dtype ['F32']"),
    ({"dtype": "I32"}, "is I32"),
    ({"dtype": "BF16", "shape": [260, 64]}, "has shape [260, 64]"),
    ({"shape": [-260, -32]}, "has shape [-260, -32]"),
    ({"shape": [2**40, 2**40]}, "bytes, stored 33280"),
    ({"shape": [260, 32, True]}, "has shape [260, 32, True]"),
    ({"shape": "ab"}, "has shape 'ab'"),
    ({"shape": [1] * 10**5}, "has shape [1, 1,"),
    (None, "lacks dtype, shape or offsets"),
]


@pytest.mark.parametrize(("entry", "words"), ENTRIES)
def test_a_header_entry_that_lies_is_refused(checkpoint: Path, entry: Any, words: str) -> None:
    header, values = parts(checkpoint / FILE)
    header[EMBEDDING] = entry if entry is None else header[EMBEDDING] | entry
    write(checkpoint / FILE, join(header, values))
    built = build(checkpoint, checkpoint.parent / "engine")
    require_named(built, "CorruptFile", "BadTensorShape")
    assert words in built.message


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h, v: join(h, v, 2**63), "cannot hold a header of"),
        (lambda h, v: join(h, v, 0), "not valid JSON"),
        (lambda h, v: join(h, v)[:100], "cannot hold a header of"),
        (lambda h, v: join(h, v)[:3], "its 3 bytes"),
        (lambda h, v: join(h, v) + b"x", "its header describes"),
        (lambda h, v: join(h, v[:-1]), "its header describes"),
        (lambda h, v: join([], v), "an object is wanted"),
        (lambda h, v: join({}, v), "its header describes"),
        (lambda h, v: join(h | {"__metadata__": 5}, v), "its __metadata__ is 5"),
        (lambda h, v: join(h | {"__metadata__": {"a": [1]}}, v), "texts by name are wanted"),
        (lambda h, v: join(h | {"\ud800": EMPTY}, v), "half of a surrogate pair"),
        (lambda h, v: join(h | {"twin": h[EMBEDDING]}, v), "overlaps the tensor before it"),
    ],
)
def test_a_header_that_contradicts_its_file_is_refused(
    checkpoint: Path, change: Callable[..., bytes], words: str
) -> None:
    write(checkpoint / FILE, change(*parts(checkpoint / FILE)))
    for outcome in both(checkpoint):
        require_named(outcome, "CorruptFile")
        assert words in outcome.message


SHARDS: list[tuple[Any, str, str]] = [
    ("../outside.safetensors", "UnsafePath", "only files of the same folder"),
    ("/etc/passwd", "UnsafePath", "'/etc/passwd'"),
    ("other/shard.safetensors", "UnsafePath", "only files of the same folder"),
    ("a\\b.safetensors", "UnsafePath", "only files of the same folder"),
    ("a\0.safetensors", "UnsafePath", "'a\\x00.safetensors'"),
    ("..", "CorruptFile", "'..'"),
    ("", "CorruptFile", "''"),
    ("weights.bin", "CorruptFile", "a .safetensors name is wanted"),
    (5, "CorruptFile", "places model.embed_tokens.weight in 5"),
    ("absent.safetensors", "MissingTensor", "which does not exist"),
    ("a" * 5000 + ".safetensors", "UnsafePath", "'aaaa"),
]


@pytest.mark.parametrize("keeps_single", [False, True])
@pytest.mark.parametrize(("shard", "name", "words"), SHARDS)
def test_an_index_that_points_elsewhere_is_refused(
    checkpoint: Path, shard: Any, name: str, words: str, keeps_single: bool
) -> None:
    """Also where model.safetensors is there, and would be read without it."""
    weight_map = dict.fromkeys(parts(checkpoint / FILE)[0], FILE)
    weight_map.pop("__metadata__", None)
    if not keeps_single:
        (checkpoint / FILE).rename(checkpoint / "shard.safetensors")
        weight_map = dict.fromkeys(weight_map, "shard.safetensors")
    write(checkpoint / INDEX, {"weight_map": {**weight_map, EMBEDDING: shard}})
    for outcome in both(checkpoint):
        require_named(outcome, name)
        assert words in outcome.message


@pytest.mark.parametrize("document", ["{", "[]", {}, {"weight_map": []}, {"weight_map": {}}])
def test_an_index_that_is_none_is_refused_beside_a_single_file(
    checkpoint: Path, document: Any
) -> None:
    write(checkpoint / INDEX, document)
    for outcome in both(checkpoint):
        require_named(outcome, "CorruptFile")
        assert INDEX in outcome.message


def test_an_index_and_a_single_file_must_tell_of_the_same_tensors(checkpoint: Path) -> None:
    names = [name for name in parts(checkpoint / FILE)[0] if name != "__metadata__"]
    write(checkpoint / INDEX, {"weight_map": dict.fromkeys(names, FILE)})
    assert [outcome.code for outcome in both(checkpoint)] == [0, 0]
    write(checkpoint / INDEX, {"weight_map": dict.fromkeys(names[1:], FILE)})
    for outcome in both(checkpoint):
        require_named(outcome, "CorruptFile")
        assert "one of the two is wanted" in outcome.message


def test_files_that_are_no_files_are_refused_at_once(checkpoint: Path) -> None:
    for name in ("config.json", FILE):
        (checkpoint / name).rename(checkpoint / "kept")
        os.mkfifo(checkpoint / name)
        for outcome in both(checkpoint):
            require_named(outcome, "CorruptFile")
            assert "is a pipe" in outcome.message
        (checkpoint / name).unlink()
        (checkpoint / name).symlink_to("/dev/zero")
        for outcome in both(checkpoint):
            require_named(outcome, "CorruptFile")
            assert "is a device" in outcome.message
        (checkpoint / name).unlink()
        (checkpoint / "kept").rename(checkpoint / name)


HEADER = {
    "__metadata__": {"format": "pt"},
    "lm_head.weight": {"dtype": "F32", "shape": [260, 32], "data_offsets": [0, 33280]},
    EMBEDDING: {"dtype": "F32", "shape": [260, 32], "data_offsets": [33280, 66560]},
}


@settings(max_examples=80)
@given(mutation=mutations(HEADER))
def test_a_mutated_header_is_refused_or_read_as_it_was(
    lasting: Callable[[], Path], mutation: Mutation
) -> None:
    folder = lasting()
    write(folder / FILE, join(mutation.apply(HEADER), bytes(66560)))
    outcome = attempt("inspect", folder, "--json")
    if outcome.code:
        require_named(outcome)
    else:
        assert not mutation.is_retyped and mutation.path[0] == "__metadata__", mutation


@settings(max_examples=120)
@given(data=st.data())
def test_flipped_bytes_and_truncations_are_refused_or_harmless(
    lasting: Callable[[], Path], data: st.DataObject
) -> None:
    """Of the header alone: of the values, any are some model's."""
    folder = lasting()
    name = data.draw(st.sampled_from([FILE, "config.json", "tokenizer.json"]))
    whole = (folder / name).read_bytes()
    header, _ = parts(folder / FILE) if name == FILE else (copy.copy(whole), b"")
    end = 8 + len(json.dumps(header)) if name == FILE else len(whole)
    place = data.draw(st.integers(0, end - 1))
    if data.draw(st.booleans()):
        changed = whole[:place]
    else:
        flipped = whole[place] ^ data.draw(st.integers(1, 255))
        changed = whole[:place] + bytes([flipped]) + whole[place + 1 :]
    write(folder / name, changed)
    outcome = build(folder, folder.parent / "engine")
    if outcome.code:
        require_named(outcome)
