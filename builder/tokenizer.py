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

from llmctl.errors import CorruptFile, TokenizerError
from llmctl.quantize.format import has_file, read_json, shown

TOKENIZER_FILE = "tokenizer.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


def describe_tokenizer(files: Sequence[Path]) -> dict[str, Any]:
    """`tokenizer` of config.json: {"files": names, "hash": hex, "sha256": hex of tokenizer.json as
    it lies there, "vocab_size": largest id + 1}.

    Only files when the checkpoint has no tokenizer.json, None for the others. Raises TokenizerError
    for one that cannot be read.
    """
    named = {path.name: path for path in files}
    if TOKENIZER_CONFIG_FILE in named:
        read_tokenizer_config(named[TOKENIZER_CONFIG_FILE])
    described: dict[str, Any] = {"files": sorted(named)}
    described |= dict.fromkeys(("hash", "sha256", "vocab_size"))
    if TOKENIZER_FILE in named:
        document = read_json(named[TOKENIZER_FILE])
        try:
            meaning = _meaning(document)
            ids = [*meaning["vocab"].values(), *(token["id"] for token in meaning["added_tokens"])]
            bad = [i for i in ids if type(i) is not int or not 0 <= i < 1 << 31]
            if bad:
                raise ValueError(f"the id {shown(bad[0])}; 0 to {(1 << 31) - 1} are ids")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TokenizerError(
                f"{named[TOKENIZER_FILE]} has no readable vocabulary: {error!r}",
                fix="fetch the tokenizer files again",
            ) from error
        text = json.dumps(meaning, sort_keys=True, ensure_ascii=True)
        described["hash"] = sha256(text.encode()).hexdigest()
        described["sha256"] = file_sha256(named[TOKENIZER_FILE])
        described["vocab_size"] = max(ids, default=-1) + 1
    return described


def read_tokenizer_config(path: Path) -> dict[str, Any]:
    """tokenizer_config.json, empty where there is none. Raises TokenizerError for one that is no
    object, or whose special tokens are no text: without them a text would not end."""
    fix = "fetch the tokenizer files again"
    try:
        config = read_json(path) if has_file(path) else {}
    except CorruptFile as error:
        raise TokenizerError(str(error), fix=fix) from error
    for name in SPECIAL_TOKENS:
        if config.get(name) is not None and special_token(config, name) is None:
            raise TokenizerError(
                f"cannot read the tokenizer in {path.parent}: {name} of {path.name} is "
                f"{shown(config[name])}; text, or an object with `content`, is wanted",
                fix=fix,
            )
    return config


def special_token(config: dict[str, Any], name: str) -> str | None:
    """The text of a special token of tokenizer_config.json."""
    value = config.get(name)
    if isinstance(value, dict):  # older files store the AddedToken's fields
        value = value.get("content")
    return value if isinstance(value, str) else None


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
