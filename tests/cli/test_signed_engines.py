"""`build --sign` and `--trusted-builder`, from the command line and from Python."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from support.signing import make_ssh_key

import llmctl as package
from llmctl.errors import UntrustedEngine

pytest.importorskip("cryptography", reason="the extra `sign` is not installed")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two private keys, with the public ones beside them."""
    folder = tmp_path_factory.mktemp("keys")
    return make_ssh_key(folder / "builder"), make_ssh_key(folder / "other")


@pytest.fixture(scope="module")
def signed(engines, keys, tmp_path_factory):
    """A draft engine signed with the first key."""
    from llmctl.cli.main import execute

    out = tmp_path_factory.mktemp("signed") / "engine"
    words = ["build", "--checkpoint-dir", engines.draft_checkpoint, "--output-dir", out]
    words += ["--max-seq-len", 512, "--max-num-tokens", 128, "--sign", keys[0]]
    assert execute([str(word) for word in words]) == 0
    return out


def public(key: Path) -> Path:
    return Path(f"{key}.pub")


def test_build_says_who_signed(llmctl, engines, keys, tmp_path):
    words = ["build", "--checkpoint-dir", engines.draft_checkpoint, "--sign", keys[0]]
    words += ["--log-level", "error", "--max-seq-len", 128]
    told = llmctl(*words, "--output-dir", tmp_path / "a")
    found = re.search(r", signed by (SHA256:[\w/+]{43})\n", told.out)
    assert told.code == 0 and found is not None
    described = json.loads(llmctl(*words, "--output-dir", tmp_path / "b", "--json").out)
    assert described["signed_by"] == found[1]


def test_a_signed_engine_gives_the_text_of_the_unsigned_one(llmctl, outputs, engines, keys, signed):
    text = ["--input-text", "def f(x):"]
    plain = outputs(*text, engine=engines.draft)
    trusted = outputs(*text, "--trusted-builder", public(keys[0]), engine=signed)
    assert trusted == plain == outputs(*text, engine=signed)


def test_every_command_and_python_refuse_another_builder(llmctl, run, engines, keys, signed):
    other = public(keys[1])
    bench = ["bench", "latency", "--engine-dir", signed, "--num-requests", 1]
    for done in (
        run("--input-text", "x", "--trusted-builder", other, engine=signed),
        llmctl(*bench, "--trusted-builder", other),
        llmctl("inspect", signed, "--trusted-builder", other),
    ):
        assert done.code == 1 and "error[UntrustedEngine]" in done.err + done.out
    with pytest.raises(UntrustedEngine, match="is signed by"):
        package.open(signed, trusted_builder=str(other))
    with package.open(signed, trusted_builder=public(keys[0])) as executor:
        assert len(list(executor.generate([5, 6], max_tokens=2))) == 2


def test_a_draft_engine_must_be_signed_too(run, engines, keys, signed):
    key = public(keys[0])
    done = run("--input-text", "x", "--trusted-builder", key, "--draft-engine", signed)
    assert done.code == 1 and f"{engines.target} is not signed" in done.err
    draft = ["--draft-engine", engines.draft, "--draft-len", 3]
    done = run("--input-text", "x", "--trusted-builder", key, *draft, engine=signed)
    assert done.code == 1 and f"{engines.draft} is not signed" in done.err


def test_an_edited_engine_is_refused_before_it_is_opened(run, llmctl, keys, signed, tmp_path):
    folder = shutil.copytree(signed, tmp_path / "engine")
    config = json.loads((folder / "config.json").read_text())
    config["pretrained_config"]["eos_token_id"] = 7
    (folder / "config.json").write_text(json.dumps(config))
    assert run("--input-text", "x", engine=folder).code == 0  # well-formed: nobody was asked for
    done = run("--input-text", "x", "--trusted-builder", public(keys[0]), engine=folder)
    assert done.code == 1 and f"{folder / 'config.json'} is not what SHA256:" in done.err
    assert done.err.count("\n") == 2
    shown = llmctl("inspect", folder)
    assert shown.code == 0 and re.search(r"signature +invalid, by SHA256:", shown.out)


def test_inspect_shows_the_origin(llmctl, engines, keys, signed):
    assert re.search(r"signature +none", llmctl("inspect", engines.draft).out)
    done = llmctl("inspect", signed)
    assert re.search(r"signature +SHA256:\S+, by the key it names", done.out)
    assert "versions" in done.out and "command" in done.out
    trusted = ["--trusted-builder", public(keys[0])]
    done = llmctl("inspect", signed, *trusted, "--check-weights")
    assert re.search(r"signature +SHA256:\S+, the trusted builder's", done.out)
    for options, state in (([], "valid"), (trusted, "trusted")):
        described = json.loads(llmctl("inspect", signed, *options, "--json").out)
        assert described["signature"]["state"] == state


def test_options_without_effect_are_refused(llmctl, engines, keys, signed):
    build = ["build", "--checkpoint-dir", engines.draft_checkpoint, "--sign", keys[0]]
    for option in ("--dry-run", "--cache-key"):
        done = llmctl(*build, option)
        assert done.code == 2 and "write none" in done.err
    done = llmctl("inspect", signed, "--check-weights")
    assert done.code == 2 and "without --trusted-builder" in done.err
    done = llmctl("inspect", engines.draft_checkpoint, "--trusted-builder", public(keys[0]))
    assert done.code == 2 and "is a checkpoint" in done.err


def test_a_bad_key_ends_a_build_before_it_begins(llmctl, engines, keys, tmp_path):
    build = ["build", "--checkpoint-dir", engines.draft_checkpoint]
    done = llmctl(*build, "--output-dir", tmp_path / "x", "--sign", public(keys[0]))
    assert done.code == 2 and "error[BadKey]" in done.err and list(tmp_path.iterdir()) == []
