"""The tokenizer's part of an engine: its files, and a hash of its meaning.

The hash covers what determines token ids (vocabulary, merges, added tokens, normalizer,
pre-tokenizer), normalised over the spellings of different library versions. So a target and a draft
are compared by content, whatever their files are called or how they are formatted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from llmctl.errors import TokenizerError
from llmctl.quantize.format import read_json

TOKENIZER_FILE = "tokenizer.json"


def describe_tokenizer(files: Sequence[Path]) -> dict[str, Any]:
    """`tokenizer` of config.json: {"files": names, "hash": hex, "sha256": hex of tokenizer.json as
    it lies there, "vocab_size": largest id + 1}.

    Only files when the checkpoint has no tokenizer.json, None for the others. Raises TokenizerError
    for one that cannot be read.
    """
    named = {path.name: path for path in files}
    described: dict[str, Any] = {"files": sorted(named)}
    described |= dict.fromkeys(("hash", "sha256", "vocab_size"))
    if TOKENIZER_FILE in named:
        document = read_json(named[TOKENIZER_FILE])
        try:
            meaning = _meaning(document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TokenizerError(
                f"{named[TOKENIZER_FILE]} has no readable vocabulary: {error!r}",
                fix="fetch the tokenizer files again",
            ) from error
        text = json.dumps(meaning, sort_keys=True, ensure_ascii=True)
        described["hash"] = sha256(text.encode()).hexdigest()
        described["sha256"] = file_sha256(named[TOKENIZER_FILE])
        ids = [*meaning["vocab"].values(), *(token["id"] for token in meaning["added_tokens"])]
        described["vocab_size"] = max(ids, default=-1) + 1
    return described


def file_sha256(path: Path) -> str:
    """Of the bytes of a tokenizer.json: where it is the one stored, the meaning is, too."""
    return sha256(path.read_bytes()).hexdigest()


def _meaning(document: dict[str, Any]) -> dict[str, Any]:
    model = document["model"]
    vocab = model["vocab"]
    if isinstance(vocab, list):  # Unigram: [token, score] in order of id; scores decide too
        vocab = {f"{token} {score}": index for index, (token, score) in enumerate(vocab)}
    # "a b" until tokenizers 0.20, ["a", "b"] since
    merges = [
        merge.split(" ", 1) if isinstance(merge, str) else list(merge)
        for merge in model.get("merges") or []
    ]
    switches = ("byte_fallback", "ignore_merges", "fuse_unk", "unk_token")
    added = [
        {key: token[key] for key in ("id", "content", "lstrip", "rstrip", "normalized")}
        for token in document.get("added_tokens") or []
    ]
    return {
        "type": model.get("type"),
        "vocab": vocab,
        "merges": merges,
        "switches": {key: model[key] for key in switches if model.get(key)},
        "added_tokens": sorted(added, key=lambda token: int(token["id"])),
        "normalizer": document.get("normalizer"),
        "pre_tokenizer": document.get("pre_tokenizer"),
    }
