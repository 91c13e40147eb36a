"""The tokenizer hash: equal for equal meaning, different for different meaning."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from llmctl.builder.tokenizer import describe_tokenizer
from llmctl.errors import CorruptFile, TokenizerError


@pytest.fixture
def document() -> dict[str, Any]:
    """A small byte-level BPE as the tokenizers library writes it."""
    vocab = {"a": 0, "b": 1, "ab": 2, "c": 3, "abc": 4}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b"), ("ab", "c")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>"])
    parsed: dict[str, Any] = json.loads(tokenizer.to_str())
    return parsed


def describe(folder: Path, document: dict[str, Any], **style: Any) -> dict[str, Any]:
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(document, **style))
    return describe_tokenizer([path])


def test_the_vocabulary_counts_added_tokens(tmp_path: Path, document: dict[str, Any]) -> None:
    described = describe(tmp_path, document)
    assert described["vocab_size"] == 6 and described["files"] == ["tokenizer.json"]


def test_spelling_does_not_matter(tmp_path: Path, document: dict[str, Any]) -> None:
    wanted = describe(tmp_path, document)["hash"]
    assert describe(tmp_path, document, indent=4, ensure_ascii=True)["hash"] == wanted
    older = copy.deepcopy(document)
    older["model"]["merges"] = ["a b", "ab c"]
    older["model"]["vocab"] = dict(reversed(document["model"]["vocab"].items()))
    older["truncation"] = {"max_length": 5}  # not about meaning
    assert describe(tmp_path, older)["hash"] == wanted


def test_meaning_does(tmp_path: Path, document: dict[str, Any]) -> None:
    hashes = [describe(tmp_path, document)["hash"]]
    changes: list[tuple[list[str], Any]] = [
        (["model", "vocab"], {"a": 1, "b": 0, "ab": 2, "c": 3, "abc": 4}),
        (["model", "merges"], [["ab", "c"], ["a", "b"]]),
        (["model", "byte_fallback"], True),
        (["added_tokens"], []),
        (["normalizer"], {"type": "NFC"}),
        (["pre_tokenizer"], None),
    ]
    for path, value in changes:
        changed = copy.deepcopy(document)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        hashes.append(describe(tmp_path, changed)["hash"])
    assert len(set(hashes)) == len(hashes)


def test_a_checkpoint_without_a_tokenizer_has_no_hash() -> None:
    nothing = dict.fromkeys(("hash", "sha256", "vocab_size"))
    assert describe_tokenizer([]) == {"files": [], **nothing}


def test_an_unreadable_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="no readable vocabulary"):
        describe(tmp_path, {"model": {}})
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CorruptFile):
        describe_tokenizer([tmp_path / "tokenizer.json"])
