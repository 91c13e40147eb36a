"""The engine directory: what is written, what is read back, and every way it can be damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from llmctl.builder.container import Entry, layout, write_container
from llmctl.builder.engine_format import SCHEMA_VERSION, open_engine, read_engine_config
from llmctl.errors import CorruptEngine, EngineNotFound, RebuildNeeded
from llmctl.runtime.engines.rotary_tables import open_with_tables


@pytest.fixture
def engine(new_model, save, build_engine) -> Path:
    return Path(build_engine(save(new_model("llama", hidden_size=40, vocab_size=67))))


def rewrite(folder: Path, change: Callable[[dict], None]) -> None:
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


def test_the_safetensors_library_reads_the_same_tensors(engine: Path) -> None:
    plan, weights = open_engine(engine)
    with safe_open(engine / "rank0.engine", "pt") as file:
        assert set(file.keys()) == set(weights)
        assert file.metadata()["format"] == "llmctl"
        for name, tensor in weights.items():
            assert torch.equal(file.get_tensor(name), tensor)
    named = {t.name for t in plan.tensors if t.kind == "weight"}
    assert named == set(weights) | {"rotary"} and set(plan.rotary) == {"rotary"}


def test_a_file_does_not_grow_with_the_length(new_model, save, build_engine) -> None:
    """Tables of positions are computed when an engine is loaded."""
    checkpoint = save(new_model("llama", hidden_size=40, vocab_size=67))
    short, long = (build_engine(checkpoint, max_seq_len=length) for length in (64, 512))
    sizes = [(folder / "rank0.engine").stat().st_size for folder in (short, long)]
    assert abs(sizes[1] - sizes[0]) <= 64  # of the plan as text
    tables = [open_with_tables(folder)[1]["rotary"] for folder in (short, long)]
    assert torch.equal(tables[1][:64], tables[0]) and len(tables[1]) == 512


def test_tensors_of_whole_cache_lines_are_aligned_to_them(engine: Path) -> None:
    _, weights = open_engine(engine)
    for name, tensor in weights.items():
        num_bytes = tensor.numel() * tensor.element_size()
        alignment = 64 if num_bytes % 64 == 0 else tensor.element_size()
        assert tensor.data_ptr() % alignment == 0, name


def test_odd_sizes_keep_every_tensor_aligned_for_its_dtype(tmp_path: Path) -> None:
    entries = [
        Entry("a", "float8_e4m3fn", (3, 5)),
        Entry("b", "bfloat16", (7,)),
        Entry("c", "float32", (1,)),
        Entry("d", "float8_e4m3fn", (64,)),
        Entry("e", "float32", (3, 3)),
    ]
    assert [entry.name for entry in layout(entries)] == ["d", "c", "e", "b", "a"]
    values = {
        e.name: torch.arange(e.num_bytes, dtype=torch.uint8).view(getattr(torch, e.dtype))
        for e in entries
    }
    path = tmp_path / "x.engine"
    told: list[int] = []
    write_container(path, entries, {}, lambda name: iter([values[name]]), told.append)
    assert sum(told) == path.stat().st_size, "a progress bar would not end"
    with safe_open(path, "pt") as file:
        for entry in entries:
            found = file.get_tensor(entry.name).reshape(-1).view(torch.uint8)
            assert torch.equal(found, values[entry.name].view(torch.uint8))
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header_bytes) % 64 == 0


def test_weights_are_mapped_and_writing_to_them_leaves_the_file_alone(engine: Path) -> None:
    before = (engine / "rank0.engine").read_bytes()
    _, weights = open_engine(engine)
    weights["lm_head.weight"].zero_()
    assert (engine / "rank0.engine").read_bytes() == before


def test_the_config_says_where_the_engine_came_from(engine: Path) -> None:
    config = read_engine_config(engine)
    assert config.version == SCHEMA_VERSION and config.backend == "cpu"
    assert config.pretrained_config["architecture"] == "LlamaForCausalLM"
    assert config.build_config["max_draft_len"] == 63
    assert config.build_config["kv_cache_type"] == "PAGED"
    assert set(config.source["files"]) == {"config.json", "model.safetensors"}
    assert {"llmctl", "torch", "python"} <= set(config.versions)


def test_a_missing_engine_is_named(tmp_path: Path, engine: Path, save, new_model) -> None:
    with pytest.raises(EngineNotFound, match="nowhere does not exist"):
        read_engine_config(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(EngineNotFound, match=r"not an engine directory: it has no config\.json"):
        read_engine_config(tmp_path / "empty")
    with pytest.raises(EngineNotFound, match="checkpoint folder"):
        read_engine_config(save(new_model("llama"), "plain"))
    with pytest.raises(EngineNotFound, match="is a file; an engine directory") as caught:
        read_engine_config(engine / "config.json")
    assert caught.value.fix == f"give {engine}"
    (engine / "rank0.engine").unlink()
    with pytest.raises(EngineNotFound, match="rank0.engine"):
        open_engine(engine)


def test_another_schema_version_asks_for_a_rebuild(engine: Path) -> None:
    rewrite(engine, lambda c: c.update(version=SCHEMA_VERSION + 1, command="llmctl build --x y"))
    with pytest.raises(RebuildNeeded) as caught:
        open_engine(engine)
    assert "llmctl build --x y" in caught.value.fix and caught.value.exit_code == 4


def test_a_config_with_other_fields_is_corrupt(engine: Path) -> None:
    rewrite(engine, lambda c: c.update(extra=1))
    with pytest.raises(CorruptEngine, match="'extra'"):
        read_engine_config(engine)
    rewrite(engine, lambda c: (c.pop("extra"), c.pop("files")))
    with pytest.raises(CorruptEngine, match="lacks the field 'files'"):
        read_engine_config(engine)
    (engine / "config.json").write_text("{")
    with pytest.raises(CorruptEngine, match="not valid JSON"):
        read_engine_config(engine)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_truncated_engine_is_refused(engine: Path, keep: int) -> None:
    path = engine / "rank0.engine"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CorruptEngine, match="not a whole engine"):
        open_engine(engine)


def test_a_grown_or_foreign_engine_file_is_refused(
    engine: Path, new_model, save, build_engine
) -> None:
    path = engine / "rank0.engine"
    original = path.read_bytes()
    path.write_bytes(original + b"\0" * 64)
    with pytest.raises(CorruptEngine, match="header describes"):
        open_engine(engine)
    other = build_engine(save(new_model("llama"), "other"))
    path.write_bytes((other / "rank0.engine").read_bytes())
    with pytest.raises(CorruptEngine, match="config.json says bytes .*, the file has"):
        open_engine(engine)


def test_a_plan_that_contradicts_its_tensors_is_refused(engine: Path) -> None:
    path = engine / "rank0.engine"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["lm_head.weight"]["shape"].reverse()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])

    def sign(config: dict) -> None:
        from hashlib import sha256

        digest = sha256(len(text).to_bytes(8, "little") + text).hexdigest()
        config["files"]["rank0.engine"] = {
            "bytes": path.stat().st_size,
            "header_sha256": digest,
        }

    rewrite(engine, sign)
    with pytest.raises(CorruptEngine, match="lm_head.weight is float32"):
        open_engine(engine)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("pretrained_config.dtype", None, "dtype is None; text is wanted"),
        ("pretrained_config.hidden_size", "384", "hidden_size is '384'; a whole number is wanted"),
        ("pretrained_config.quantization", [], "an object is wanted"),
        ("pretrained_config.quantization.quant_algo", ..., "quant_algo is missing; text or null"),
        ("build_config.tokens_per_block", True, "tokens_per_block is True"),
        ("weights.load_format", ..., "load_format is missing"),
    ],
)
def test_a_config_without_what_readers_rely_on_is_corrupt(
    engine: Path, name: str, value: object, message: str
) -> None:
    *outer, last = name.split(".")

    def damage(config: dict[str, Any]) -> None:
        for key in outer:
            config = config[key]
        if value is ...:
            del config[last]
        else:
            config[last] = value

    rewrite(engine, damage)
    with pytest.raises(CorruptEngine, match=message):
        read_engine_config(engine)
