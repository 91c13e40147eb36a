"""Builds of one cache key produce the same engine, and nothing else shares a key."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from llmctl.builder.build import plan_build
from llmctl.builder.cache_key import cache_key
from llmctl.builder.config import BuildRequest

LIMITS = {"max_seq_len": 96, "max_batch_size": 2}


@pytest.fixture
def checkpoint(new_model, save) -> Path:
    folder = Path(save(new_model("llama", dtype="bfloat16")))
    (folder / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {"a": 0}}}')
    return folder


def _key(folder: Path, backend: str = "cpu", plugins: dict | None = None, **limits: int) -> str:
    request = BuildRequest(**{**LIMITS, **limits})
    engine = plan_build(
        folder,
        request,
        backend=backend,
        plugins=plugins,
        command=f"llmctl build {folder}",
        with_binaries=False,
    )
    return cache_key(engine)


def test_the_key_is_one_for_equal_content_wherever_it_lies(checkpoint, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(checkpoint, copy)
    key = _key(checkpoint)
    assert key == _key(copy) and len(bytes.fromhex(key)) == 32


def test_one_changed_weight_changes_the_key_though_every_header_is_equal(checkpoint):
    before, path = _key(checkpoint), checkpoint / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-2] ^= 1  # the last bit of one value's mantissa
    path.write_bytes(raw)
    assert _key(checkpoint) != before


def test_every_limit_and_tokenizer_file_counts(checkpoint):
    keys = [
        _key(checkpoint),
        _key(checkpoint, max_draft_len=4),
        _key(checkpoint, max_batch_size=3),
        _key(checkpoint, tokens_per_block=64),
    ]
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    keys.append(_key(checkpoint))
    assert len(set(keys)) == len(keys)


def test_backend_and_plugin_options_count(new_model, save):
    sizes = {"hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = Path(save(new_model("llama", dtype="bfloat16", **sizes)))
    keys = [
        _key(folder),
        _key(folder, backend="cuda"),
        _key(folder, backend="cuda", plugins={"gemm_swiglu_plugin": "disable"}),
    ]
    assert len(set(keys)) == len(keys)


def test_the_code_that_makes_engines_counts(checkpoint, monkeypatch):
    before = _key(checkpoint)
    monkeypatch.setattr("llmctl.builder.cache_key._software_digest", lambda: "another")
    assert _key(checkpoint) != before


def test_the_command_prints_the_key_and_writes_nothing(checkpoint, tmp_path, capsys):
    from llmctl.cli.main import execute

    output = tmp_path / "engine"
    line = ["build", "--backend", "cpu", "--checkpoint-dir", str(checkpoint), "--cache-key"]
    assert execute([*line, "--output-dir", str(output)]) == 0
    first = capsys.readouterr().out
    assert execute([*line, "--output-dir", str(tmp_path / "other"), "--json"]) == 0
    assert capsys.readouterr().out == f'{{"cache_key": "{first.strip()}"}}\n'
    assert not output.exists()
