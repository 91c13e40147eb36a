"""Tokenizers and chat templates of strangers."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from support.hostile import TEMPLATE, bounded, build, require_named, run, write
from support.mutations import Mutation, mutations

from llmctl.cli.chat_template import render
from llmctl.cli.tokenizer import Tokenizer
from llmctl.errors import LlmctlError, TokenizerError

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"


def rewritten(folder: Path, name: str, **fields: Any) -> Path:
    """The folder, with fields of one of its documents replaced."""
    write(folder / name, json.loads((folder / name).read_text()) | fields)
    return folder


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ([], "holds a JSON list"),
        ("null", "an object is wanted"),
        ("[" * 100_000, "nested too deeply"),
        ('{"eos_token": "</s>", "eos_token": "<s>"}', "occurs twice"),
        ('{"x": NaN}', "NaN is not JSON"),
        ('{"eos_token": "\\ud800"}', "half of a surrogate pair"),
        ({"eos_token": 5}, "eos_token of tokenizer_config.json is 5"),
        ({"eos_token": ["</s>"]}, "is ['</s>']"),
        ({"eos_token": {"content": 5}}, "text, or an object with `content`, is wanted"),
        ({"bos_token": [1]}, "bos_token of tokenizer_config.json is [1]"),
    ],
)
def test_an_odd_tokenizer_config_is_refused_when_built_and_when_read(
    checkpoint: Path, document: Any, words: str
) -> None:
    write(checkpoint / CONFIG, document)
    built = build(checkpoint, checkpoint.parent / "engine")
    require_named(built, "TokenizerError")
    assert words in built.message
    with pytest.raises(TokenizerError) as refused:
        Tokenizer(checkpoint)
    assert words in str(refused.value) and refused.value.fix


def test_an_end_token_outside_the_vocabulary_is_refused(sound: Any, checkpoint: Path) -> None:
    rewritten(checkpoint, CONFIG, eos_token="<nowhere>")
    outcome = run(sound.engine, "--input-text", "a", "--tokenizer-dir", checkpoint)
    require_named(outcome, "TokenizerError")
    assert "'<nowhere>' as eos_token" in outcome.message


def replacing(pattern: str, content: str, times: int = 1) -> dict[str, Any]:
    """A normalizer of equal replacements."""
    one = {"type": "Replace", "pattern": {"String": pattern}, "content": content}
    return {"normalizer": {"type": "Sequence", "normalizers": [one] * times}}


def charsmap(table: bytes) -> dict[str, Any]:
    """A SentencePiece normalizer of that table."""
    text = base64.b64encode(table).decode()
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": text}}


FIELDS: list[tuple[dict[str, Any], str]] = [
    ({"model": None}, "is not a tokenizer"),
    ({"model": {"type": "Unigram", "unk_id": 5, "vocab": [["a", 0.0]]}}, "is not a tokenizer"),
    ({"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}}, "cannot encode"),
    ({"model": {"type": "BPE", "dropout": 0.5, "vocab": {"a": 0}, "merges": []}}, "at random"),
    ({"added_tokens": "x"}, "is not a tokenizer"),
    ({"normalizer": {"type": "Nope"}}, "is not a tokenizer"),
    (replacing("", "xx"), "make inf characters of one"),
    (replacing("f", "f" * 100, 6), "make 1e+12 characters of one"),
    (charsmap(b"\0" * 3), "has 3 bytes and tells of 0"),
    (charsmap(b"\xff\xff\xff\xfc" + bytes(8)), "tells of 4244635647"),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated",
                        "invert": False}}, "is not a tokenizer"),
    ({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(f+)+$"}, "behavior": "Isolated",
                        "invert": False}}, "cannot encode the text"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "words"), FIELDS)
def test_a_tokenizer_that_cannot_be_used_is_refused(
    sound: Any, checkpoint: Path, fields: dict[str, Any], words: str
) -> None:
    rewritten(checkpoint, FILE, **fields)
    text = "f" * 40 + "!"
    outcome = run(sound.engine, "--input-text", text, "--tokenizer-dir", checkpoint)
    require_named(outcome, "TokenizerError")
    assert words in outcome.message and "fetch the tokenizer files" in outcome.fix


@pytest.mark.parametrize("value", ["b", -1, 2**31, 5.5, None])
def test_ids_that_are_none_are_refused_when_built(checkpoint: Path, value: Any) -> None:
    document = json.loads((checkpoint / FILE).read_text())
    document["model"]["vocab"]["zz"] = value
    write(checkpoint / FILE, document)
    outcome = build(checkpoint, checkpoint.parent / "engine")
    require_named(outcome, "TokenizerError")
    assert "are ids" in outcome.message


def test_ids_outside_the_models_vocabulary_are_refused_by_the_request(
    sound: Any, checkpoint: Path
) -> None:
    document = json.loads((checkpoint / FILE).read_text())
    for name in ("near", "nearer", "far"):  # the tokenizer has 258 of the model's 260 ids
        added = document["added_tokens"][0] | {"id": 10**6, "content": name}
        document["added_tokens"].append(added)
    write(checkpoint / FILE, document)
    outcome = run(sound.engine, "--input-text", "far", "--tokenizer-dir", checkpoint)
    require_named(outcome, "BadConfig")
    assert "token id 260; the engine's ids are 0 to 259" in outcome.message


SMALL = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [{"id": 0, "content": "<s>", "single_word": False, "lstrip": False,
                      "rstrip": False, "normalized": False, "special": True}],
    "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
                      "use_regex": True},
    "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                "use_regex": True},
    "model": {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False,
              "byte_fallback": False, "ignore_merges": False,
              "vocab": {"<s>": 0, "a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]},
}  # fmt: skip


@settings(max_examples=200)
@given(mutation=mutations(SMALL))
def test_a_mutated_tokenizer_is_refused_or_encodes(
    tmp_path_factory: pytest.TempPathFactory, mutation: Mutation
) -> None:
    folder = tmp_path_factory.getbasetemp() / "mutated-tokenizer"
    folder.mkdir(exist_ok=True)
    write(folder / FILE, mutation.apply(SMALL))
    with bounded():
        try:
            tokenizer = Tokenizer(folder)
            tokenizer.decode(tokenizer.encode("ab a<s>"))
        except LlmctlError as error:
            assert error.name == "TokenizerError" and error.fix


# ---- chat templates ----

TEMPLATES: list[tuple[str, str]] = [
    ("{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3, "computes for more than 2 s"),
    ("{{ 'a' * 10000000000 }}", "more than 512 MiB of memory"),
    ("{{ 'a'.ljust(20000000) }}", "makes 20000000 characters; at most 16777216"),
    ("{{ lipsum.__globals__['os'].popen('touch {ran}').read() }}", "fails: "),
    ("{{ ''.__class__.__mro__[1].__subclasses__()[0]() }}", "fails: "),
    ("{{ '{0.__class__.__init__.__globals__}'.format(messages) }}", "fails: "),
    ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ("{{ raise_exception('no ' * 5000) }}", "no no no"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "words"), TEMPLATES)
def test_a_template_neither_runs_python_nor_for_ever_nor_takes_the_memory(
    tmp_path: Path, template: str, words: str
) -> None:
    ran = tmp_path / "ran"
    (found,) = render(template.replace("{ran}", str(ran)), {"bos_token": "<s>"}, ["hi"], "x")
    assert not ran.exists()
    assert isinstance(found, TokenizerError) and len(str(found)) < 600, found
    assert words in str(found) and found.fix


def test_a_template_that_fails_is_the_rows_error(sound: Any, checkpoint: Path) -> None:
    rewritten(checkpoint, CONFIG, chat_template="{{ messages[0].content }}{{ 1 // 0 }}")
    outcome = run(sound.engine, "--chat", "--input-text", "a", "--tokenizer-dir", checkpoint)
    require_named(outcome, "TokenizerError")
    assert "division" in outcome.message


def test_each_message_has_its_own_answer() -> None:
    template = TEMPLATE + "{% if 'b' in messages[0].content %}{{ raise_exception('b') }}{% endif %}"
    a, b, c = render(template, {"bos_token": "<s>"}, ["a", "b", "c"], "x")
    assert (a, c) == ("<s>[user]a", "<s>[user]c") and isinstance(b, TokenizerError)


def test_what_lies_in_the_current_folder_is_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("jinja2", "transformers", "json"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    monkeypatch.chdir(tmp_path)
    assert render("{{ messages[0].content }}", {}, ["a"], "x") == ["a"]
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("template", [5, [1], {"a": 1}, [{"name": "other", "template": "x"}]])
def test_a_template_that_is_none_is_named(checkpoint: Path, template: Any) -> None:
    rewritten(checkpoint, CONFIG, chat_template=template)
    with pytest.raises(TokenizerError) as refused:
        Tokenizer(checkpoint).chat_prompt("a")
    assert refused.value.fix


def test_a_class_of_several_tokenizers_has_no_template(sound: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(sound.engine / "tokenizer", tmp_path / "tokenizer")
    rewritten(folder, CONFIG, tokenizer_class="RagTokenizer")
    outcome = run(sound.engine, "--chat", "--input-text", "a", "--tokenizer-dir", folder)
    require_named(outcome, "TokenizerError")
    assert "RagTokenizer is no tokenizer of one text" in outcome.message
