"""The light tokenizer gives the ids and texts that transformers gives."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer

from llmctl.cli.tokenizer import Tokenizer
from llmctl.errors import TokenizerError

TEXTS = [
    "def add(a, b):\n    return a + b\n",
    "  leading and trailing  ",
    "naïve café 🙂 日本語",
    "<|begin|>explicit<|end|> tokens",
    "don't , do . this !",
    "",
]


def check_equal(folder: Path) -> None:
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids, (text, special)
            assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.end_id == theirs.eos_token_id


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"add_bos_token": True},
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False, "add_eos_token": True},
        {"add_bos_token": True, "bos_token": None},
        {"bos_token": {"content": "<|begin|>", "lstrip": False, "__type": "AddedToken"}},
        {"eos_token": None},
    ],
    ids=str,
)
def test_byte_level_tokenizers_agree_with_transformers(tmp_path, make_tokenizer, config):
    check_equal(make_tokenizer(tmp_path, **config))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word", "normalized", "special"])
@pytest.mark.parametrize("content", ["add", "<new>"])
def test_added_tokens_of_the_config_agree_with_transformers(
    tmp_path, make_tokenizer, content, flag
):
    folder = make_tokenizer(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(["add"])
    backend.save(str(folder / "tokenizer.json"))
    number = backend.token_to_id(content) or backend.get_vocab_size()
    path = folder / "tokenizer_config.json"
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized", "special"), False)
    listed = {str(number): {"content": content, **flags, flag: True}}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"added_tokens_decoder": listed}))
    check_equal(folder)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("x add  adder <new> y<new>", " add <|end|> <new>"):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("listed", [[1], {"x": {}}, {"5": "a"}, {"5": {"content": 3}}])
def test_added_tokens_that_are_none_are_named(tmp_path, make_tokenizer, listed):
    with pytest.raises(TokenizerError, match="added_tokens_decoder"):
        Tokenizer(make_tokenizer(tmp_path, added_tokens_decoder=listed))


def test_a_template_of_the_file_itself_is_kept(tmp_path, make_tokenizer):
    """Llama 3 has its bos token in tokenizer.json's post-processor."""
    folder = make_tokenizer(tmp_path)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
    )
    backend.enable_truncation(3)
    backend.enable_padding(length=8)
    backend.save(str(folder / "tokenizer.json"))
    ids = Tokenizer(folder).encode("def add(a, b): return a + b")
    assert ids[0] == 0 and len(ids) > 3 and ids.count(0) == 1  # not cut, not padded
    theirs = AutoTokenizer.from_pretrained(folder)
    assert ids == theirs.encode("def add(a, b): return a + b", truncation=False, padding=False)


def write_sentencepiece(folder: Path) -> Path:
    """Llama 2: spaces become a symbol, unknown characters become byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocab |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", *"abcdefghijklmnopqrstuvwxyz", "▁d", "▁de", "▁def", "ad", "add"):
        vocab[piece] = len(vocab)
    merges = [("▁", "d"), ("▁d", "e"), ("▁de", "f"), ("a", "d"), ("ad", "d")]
    backend = Backend(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True}
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_a_sentencepiece_style_tokenizer_agrees_with_transformers(tmp_path):
    check_equal(write_sentencepiece(tmp_path))


@pytest.mark.parametrize("insists", [True, False])
@pytest.mark.parametrize("asks", [True, False, None])
@pytest.mark.parametrize("kind", ["words", "bpe"])
def test_spaces_are_cleaned_up_where_transformers_does(
    tmp_path, make_tokenizer, kind, asks, insists
):
    name = "clean_up_tokenization_spaces"
    fields = {name: asks, f"{name}_for_bpe_even_though_it_will_corrupt_output": insists}
    folder = make_tokenizer(tmp_path, **fields)
    text = "it 's n't , is it ? I 'm , 've ' re , ' a ' . ! 're . ' , ."
    if kind == "words":
        vocab = {word: index for index, word in enumerate(dict.fromkeys(text.split()))}
        backend = Backend(models.WordLevel(vocab | {"<|end|>": len(vocab)}, unk_token="it"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        backend.save(str(folder / "tokenizer.json"))
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("kind", ["byte-level", "sentencepiece"])
def test_a_character_in_the_making_is_held_back(tmp_path, make_tokenizer, kind):
    write = make_tokenizer if kind == "byte-level" else write_sentencepiece
    tokenizer, draws = Tokenizer(write(tmp_path)), random.Random(5)
    texts = ["".join(draws.choice("aé日🙂 def") for _ in range(6)) + "." for _ in range(30)]
    for text in ("ok 🙂", "🙂🙂", *texts):
        ids = tokenizer.encode(text)
        so_far = [tokenizer.decode_so_far(ids[:count]) for count in range(len(ids) + 1)]
        assert so_far[-1] == tokenizer.decode(ids) == text
        assert all(later.startswith(text) for text, later in itertools.pairwise(so_far))
        if "🙂" in text:
            assert len(set(so_far)) < len(so_far)  # some token completed no character


def test_the_chat_template_is_applied_once_and_adds_no_second_bos(
    tmp_path, make_tokenizer, chat_template
):
    folder = make_tokenizer(tmp_path, chat_template=chat_template, add_bos_token=True)
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, return_dict=False
    )
    ids = Tokenizer(folder).chat_prompt("hi")
    assert ids == theirs and ids.count(0) == 1


@pytest.mark.parametrize("field", ["tokenizer_class", "bos_token", "chat_template"])
def test_a_chat_whose_tokenizer_transformers_cannot_read_is_named(
    tmp_path, make_tokenizer, chat_template, field
):
    folder = make_tokenizer(tmp_path, chat_template=chat_template)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: [1]}))
    with pytest.raises(TokenizerError, match="cannot read the tokenizer"):
        Tokenizer(folder).chat_prompt("hi")


def test_code_that_a_tokenizer_brings_is_refused_without_a_question(
    tmp_path, make_tokenizer, chat_template, monkeypatch, capsys
):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run code"))
    own = {"AutoTokenizer": ["own.OwnTokenizer", None]}
    folder = make_tokenizer(tmp_path / "t", chat_template=chat_template, auto_map=own)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "OwnTokenizer"}))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass OwnTokenizer: 0\n")
    with pytest.raises(TokenizerError, match="custom code"):
        Tokenizer(folder).chat_prompt("hi")
    assert not (tmp_path / "ran").exists() and capsys.readouterr().out == ""


def test_a_chat_without_a_template_is_named(tmp_path, make_tokenizer):
    with pytest.raises(TokenizerError, match="no chat template"):
        Tokenizer(make_tokenizer(tmp_path)).chat_prompt("hi")


def test_a_template_that_fails_is_named(tmp_path, make_tokenizer):
    folder = make_tokenizer(tmp_path, chat_template="{{ raise_exception('no users here') }}")
    with pytest.raises(TokenizerError, match="no users here"):
        Tokenizer(folder).chat_prompt("hi")


def test_missing_and_broken_files_are_named(tmp_path, make_tokenizer):
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json"):
        Tokenizer(tmp_path)
    folder = make_tokenizer(tmp_path)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(TokenizerError, match="not valid JSON"):
        Tokenizer(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(TokenizerError, match="is not a tokenizer"):
        Tokenizer(folder)
