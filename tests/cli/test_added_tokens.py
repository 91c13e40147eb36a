"""Added and special tokens, wherever a tokenizer's folder says them, are those of transformers."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from llmctl.cli.tokenizer import Tokenizer
from llmctl.errors import TokenizerError

WORDS = ["<pad>", "<a>", "<b>", "add", "<|begin|>", "<|end|>", " self", "return"]
TEXTS = ["def add(<pad>, x) <a>: return self <b> <|end|>", " <pad> <a><b> add<|begin|> self return"]
NAMES = ["pad_token", "unk_token", "sep_token", "cls_token", "mask_token", "image_token"]
FLAGS = ["lstrip", "rstrip", "single_word", "normalized"]


def some_folder(draws: random.Random, folder: Path) -> Path:
    """A folder whose files say things of tokens at random, each file as its exporters write it."""

    def fields(**more: Any) -> dict[str, Any]:
        flags = {name: draws.random() < 0.3 for name in FLAGS}
        return {"content": draws.choice(WORDS), **flags, **more}

    backend = Backend.from_file(str(folder / "tokenizer.json"))
    for _ in range(draws.randrange(3)):
        backend.add_tokens([AddedToken(**fields(special=draws.random() < 0.5))])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name in NAMES:
        if draws.random() < 0.4:
            config[name] = draws.choice([draws.choice(WORDS), fields(__type="AddedToken")])
    config["split_special_tokens"] = draws.random() < 0.1
    size = backend.get_vocab_size()
    if draws.random() < 0.4:
        ids = range(size, size + draws.randrange(4))
        special = draws.random() < 0.5
        config["added_tokens_decoder"] = {str(index): fields(special=special) for index in ids}
    if draws.random() < 0.5:
        key = draws.choice(["additional_special_tokens", "extra_special_tokens"])
        config[key] = draws.sample(WORDS, 2)
    elif draws.random() < 0.3:
        config["extra_special_tokens"] = {"audio_token": draws.choice(WORDS)}
    if draws.random() < 0.4:
        said = {draws.choice(NAMES[:-1]): draws.choice([draws.choice(WORDS), fields()])}
        key = draws.choice(["additional_special_tokens", "extra_special_tokens", "pad_token"])
        said[key] = draws.choice(WORDS) if key == "pad_token" else draws.sample(WORDS, 2)
        (folder / "special_tokens_map.json").write_text(json.dumps(said))
    if draws.random() < 0.4:
        added = {word: size + i for i, word in enumerate(draws.sample(WORDS, 2))}
        (folder / "added_tokens.json").write_text(json.dumps(added))
    if draws.random() < 0.1:
        config["pad_token"] = None
    if draws.random() < 0.4:  # what whoever saved the file padded with
        backend.enable_padding(pad_id=draws.randrange(9), pad_token=draws.choice(WORDS))
        backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_files_say_ids_and_texts_are_those_of_transformers(
    seed, tmp_path, make_tokenizer
):
    folder = some_folder(random.Random(seed), make_tokenizer(tmp_path))
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.end_id == theirs.eos_token_id
    assert ours.pad_id == (theirs.eos_token_id if theirs.pad_token is None else theirs.pad_token_id)


@pytest.mark.parametrize(
    ("file", "said", "text"),
    [
        ("tokenizer_config.json", {"extra_special_tokens": 5}, "extra_special_tokens of .* is 5"),
        ("tokenizer_config.json", {"additional_special_tokens": [5]}, "is 5"),
        ("tokenizer_config.json", {"extra_special_tokens": {"audio_token": 5}}, "audio_token of"),
        ("tokenizer_config.json", {"sep_token": 5}, "sep_token of tokenizer_config.json is 5"),
        ("special_tokens_map.json", {"pad_token": {"text": "a"}}, "pad_token of special_"),
        ("special_tokens_map.json", [], "special_tokens_map.json holds a JSON list"),
        ("added_tokens.json", {"<a>": "5"}, "<a> of added_tokens.json is '5'"),
    ],
)
def test_what_is_no_token_is_named(file, said, text, tmp_path, make_tokenizer):
    folder = make_tokenizer(tmp_path)
    if file == "tokenizer_config.json":
        said = json.loads((folder / file).read_text()) | said
    (folder / file).write_text(json.dumps(said))
    with pytest.raises(TokenizerError, match=text):
        Tokenizer(folder)
