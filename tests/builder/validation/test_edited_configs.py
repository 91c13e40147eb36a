"""A config.json that was edited is refused by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.hostile import bounded
from support.hostile_engine import ENGINE, Edited, HostileEngine, refuse, write_text

from llmctl.cli.inspect.engine import describe_engine
from llmctl.errors import CorruptEngine, LlmctlError


@pytest.mark.parametrize(
    ("part", "name", "value", "match"),
    [
        ("pretrained_config", "vocab_size", 10**9, "the plan has"),
        ("pretrained_config", "vocab_size", 10**18, "a whole number is wanted"),
        ("pretrained_config", "dtype", "evil", "dtype is 'evil'"),
        ("pretrained_config", "dtype", "float16", "the model's dtype is float16"),
        ("pretrained_config", "intermediate_size", "48", "intermediate_size is '48'; a whole"),
        ("pretrained_config", "num_hidden_layers", 1, "num_hidden_layers is 1"),
        ("pretrained_config", "num_attention_heads", 4, "num_heads"),
        ("pretrained_config", "norm_epsilon", 1e-5, "norm_epsilon"),
        ("pretrained_config", "norm_epsilon", "1", "norm_epsilon|config.json"),
        ("pretrained_config", "tie_word_embeddings", None, "tie_word_embeddings is None"),
        ("pretrained_config", "attention_windows", [0, 8], "attention_windows"),
        ("pretrained_config", "eos_token_id", -2, "eos_token_id"),
        ("pretrained_config", "eos_token_id", [1, 10**6], "ids of the vocabulary, 0 to"),
        ("build_config", "max_seq_len", 10**9, "max_seq_len"),
        ("build_config", "max_seq_len", -1, "max_seq_len is -1"),
        ("build_config", "max_batch_size", -8, "max_batch_size is -8"),
        ("build_config", "max_batch_size", 3, "max_batch_size"),
        ("build_config", "max_draft_len", -1, "max_draft_len is -1"),
        ("build_config", "max_num_tokens", 0, "max_num_tokens is 0"),
        ("build_config", "max_num_tokens", 23, "max_num_tokens is 23"),
        ("build_config", "tokens_per_block", 0, "tokens_per_block is 0"),
        ("build_config", "kv_cache_dtype", "bfloat16", "kv_cache_dtype"),
        ("build_config", "kv_cache_type", "CONTINUOUS", "tokens_per_block"),
        ("build_config", "tp_size", 0, "tp_size is 0"),
        ("build_config", "speculative_decoding_mode", None, "one of .* is wanted"),
        ("build_config", "speculative_decoding_mode", 1, "speculative_decoding_mode with drafts"),
    ],
)
def test_a_config_that_contradicts_the_plan_is_refused(
    edited: Edited, part: str, name: str, value: object, match: str
) -> None:
    refuse(edited(lambda e: e.config[part].update({name: value})), match)


@pytest.mark.parametrize("value", ["evil", None, [], {}, True])
def test_a_backend_that_is_none_is_refused(edited: Edited, value: object) -> None:
    refuse(edited(lambda e: e.config.update(backend=value)), "names the backend")


def test_a_recipe_of_weights_that_are_stored_is_refused(edited: Edited) -> None:
    recipe = {"load_format": "dummy", "seed": 0}
    refuse(edited(lambda e: e.config.update(weights=recipe)), "does not make")
    refuse(edited(lambda e: e.config.update(weights={"load_format": "dummy"})), "weights.seed")


@pytest.fixture
def folder(engines: dict[str, tuple[HostileEngine, list[int]]], tmp_path: Path) -> Path:
    """An engine whose config.json a test writes anew, as text."""
    return engines["fp8"][0].write(tmp_path / "engine")


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_number_that_is_none_of_json_is_refused(folder: Path, text: str) -> None:
    config = (folder / "config.json").read_text()
    number = json.dumps(json.loads(config)["pretrained_config"]["norm_epsilon"])
    (folder / "config.json").write_text(config.replace(number, text, 1))
    with pytest.raises(CorruptEngine, match="not valid JSON"):
        write_text(folder)


def test_a_key_that_is_there_twice_is_refused(folder: Path) -> None:
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace("{", '{"version": 0, ', 1))
    with pytest.raises(CorruptEngine, match="'version' is there twice"):
        write_text(folder)


def test_json_that_is_nested_without_end_is_refused(folder: Path) -> None:
    (folder / "config.json").write_text('{"version": ' + "[" * 100_000)
    with pytest.raises(LlmctlError):
        write_text(folder)
    assert (folder / ENGINE).is_file()


def test_json_that_is_nested_deeper_than_what_is_written_is_refused(folder: Path) -> None:
    """What reads it goes down by itself; what copies it and shows it, by calls of Python."""
    document = json.loads((folder / "config.json").read_text())
    text = json.dumps(document | {"source": {"deep": "DEEP"}})
    for levels, is_read in ((14, True), (15, False), (700, False)):
        deep = "[" * levels + "]" * levels
        (folder / "config.json").write_text(text.replace('"DEEP"', deep))
        if is_read:
            write_text(folder)
            continue
        with pytest.raises(CorruptEngine, match="nested in more than 16 levels"):
            describe_engine(folder, read_gb_s=1.0)


def test_a_config_that_is_too_large_to_be_one_is_not_read(folder: Path) -> None:
    os.truncate(folder / "config.json", 1 << 36)  # of which the disk holds nothing
    with pytest.raises(CorruptEngine, match="has 68719476736 bytes; at most"):
        write_text(folder)


def test_a_key_that_is_there_twice_is_found_at_once_among_many(folder: Path) -> None:
    keys = [f'"{index}": 0' for index in range(300_000)]
    (folder / "config.json").write_text("{" + ", ".join([*keys, keys[-1]]) + "}")
    with bounded(), pytest.raises(CorruptEngine, match="'299999' is there twice"):
        write_text(folder)
