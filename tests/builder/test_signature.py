"""Signatures of engine directories: what they cover, and which keys are read."""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.hostile import bounded
from support.signing import (
    CODE,
    change_byte,
    make_ssh_key,
    run_tool,
    write_engine_files,
)

from llmctl.builder.engine_format import open_engine
from llmctl.builder.signature import (
    FORMAT,
    SIGNATURE_FILE,
    describe_signature,
    require_signed,
    sign_engine,
)
from llmctl.builder.signing_keys import PublicKey, SigningKey
from llmctl.errors import EngineNotFound, MissingPackage, UntrustedEngine

pytest.importorskip("cryptography", reason="the extra `sign` is not installed")


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The builder's private key; the public one is beside it."""
    return make_ssh_key(tmp_path_factory.mktemp("keys") / "builder")


@pytest.fixture(scope="module")
def builder(key: Path) -> PublicKey:
    return PublicKey.read(Path(f"{key}.pub"))


@pytest.fixture
def signed(tmp_path: Path, key: Path) -> Path:
    folder = write_engine_files(tmp_path / "engine")
    sign_engine(folder, SigningKey.read(key))
    return folder


def edit(folder: Path, change: Callable[[dict], None]) -> None:
    """Change the content of signature.json."""
    content = json.loads((folder / SIGNATURE_FILE).read_text())
    change(content)
    (folder / SIGNATURE_FILE).write_text(json.dumps(content))


def test_what_was_signed_is_accepted_and_moves_as_a_folder(signed, builder, tmp_path):
    require_signed(signed, builder, with_weights=True)
    moved = shutil.copytree(signed, tmp_path / "elsewhere")
    require_signed(moved, builder, with_weights=True)
    described = describe_signature(moved)
    assert described == {"state": "valid", "key": builder.fingerprint, "problem": None}


@pytest.mark.parametrize("place", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
@pytest.mark.parametrize(
    "name", [SIGNATURE_FILE, "rank0.engine", "tokenizer/tokenizer.json", "tokenizer/more.json"]
)
def test_what_is_no_file_is_refused_and_not_waited_for(signed, builder, name, place):
    (signed / name).unlink(missing_ok=True)
    place(signed / name)
    with bounded(), pytest.raises(UntrustedEngine, match=name):
        require_signed(signed, builder)
    with bounded():
        assert describe_signature(signed)["state"] == "invalid"


def test_a_key_that_is_none_is_told_of(signed):
    edit(signed, lambda content: content.update(public_key="ssh-ed25519 AAAA"))
    described = describe_signature(signed)
    assert described["state"] == "invalid" and described["problem"]


def test_a_link_to_templates_that_nobody_signed_is_refused(signed, builder, tmp_path):
    """transformers reads every template in such a folder."""
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "default.jinja").write_text("{{ 1 }}")
    (signed / "tokenizer" / "additional_chat_templates").symlink_to(tmp_path / "templates")
    with pytest.raises(UntrustedEngine, match="additional_chat_templates is not what"):
        require_signed(signed, builder)


def test_ssh_keygen_and_openssl_agree(signed, key, builder, tmp_path):
    printed = run_tool("ssh-keygen", "-lf", f"{key}.pub")
    assert builder.fingerprint in printed.split()
    # openssl reads the public key in PEM alone: ask ssh-keygen's own bytes for the 32 of the key.
    content = json.loads((signed / SIGNATURE_FILE).read_text())
    blob = base64.b64decode(content["public_key"].split()[1])
    (length,) = struct.unpack(">I", blob[-36:-32])
    assert length == 32
    info = bytes.fromhex("302a300506032b6570032100") + blob[-32:]  # RFC 8410
    (tmp_path / "key.der").write_bytes(info)
    text = json.dumps(content["document"], sort_keys=True, separators=(",", ":"))
    (tmp_path / "message").write_bytes(f"{FORMAT}\n{text}".encode())
    (tmp_path / "signature").write_bytes(base64.b64decode(content["signature"]))
    verify = ["pkeyutl", "-verify", "-rawin", "-pubin", "-keyform", "DER"]
    files = ["-inkey", tmp_path / "key.der", "-in", tmp_path / "message"]
    said = run_tool("openssl", *verify, *files, "-sigfile", tmp_path / "signature")
    assert "Verified Successfully" in said


def swap_cubin(folder: Path) -> None:
    change_byte(folder / "rank0.engine", bytes(range(100, 140)))


def edit_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"version": 8, "eos": 3}')


def edit_header(folder: Path) -> None:
    change_byte(folder / "rank0.engine", b'"plan"', 1)


def cut_engine(folder: Path) -> None:
    path = folder / "rank0.engine"
    path.write_bytes(path.read_bytes()[:-1])


def add_template(folder: Path) -> None:
    (folder / "tokenizer" / "chat_template.jinja").write_text("{{ 1 }}")


def change_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").write_text("[]")


def remove_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def add_rank(folder: Path) -> None:
    shutil.copy(folder / "rank0.engine", folder / "rank1.engine")


def remove_engine(folder: Path) -> None:
    (folder / "rank0.engine").unlink()


@pytest.mark.parametrize(
    "change, named",
    [
        (swap_cubin, f"rank0.engine: {CODE}"),
        (edit_config, "config.json"),
        (edit_header, "rank0.engine"),
        (cut_engine, "rank0.engine"),
        (add_template, "tokenizer/chat_template.jinja"),
        (change_tokenizer, "tokenizer/tokenizer.json"),
        (remove_tokenizer, "tokenizer/tokenizer.json"),
        (add_rank, "rank1.engine"),
        (remove_engine, "rank0.engine"),
    ],
)
def test_a_change_is_refused_by_its_name(signed, builder, change, named):
    change(signed)
    with pytest.raises(UntrustedEngine) as caught:
        require_signed(signed, builder)
    assert f"{signed / named} is not what {builder.fingerprint} signed" == str(caught.value)
    assert describe_signature(signed)["state"] == "invalid"


def test_every_cubin_of_a_cuda_engine_is_covered(cuda_engines, key, builder, tmp_path):
    folder = shutil.copytree(cuda_engines("llama"), tmp_path / "engine")
    sign_engine(folder, SigningKey.read(key))
    require_signed(folder, builder)
    plan, tensors = open_engine(folder)
    document = json.loads((folder / SIGNATURE_FILE).read_text())["document"]
    code = document["engines"]["rank0.engine"]["code"]
    assert set(code) == {kernel.tensor for kernel in plan.kernels} != set()
    for name in (min(code), max(code)):
        change_byte(folder / "rank0.engine", tensors[name].numpy().tobytes(), 70)
        with pytest.raises(UntrustedEngine) as caught:
            require_signed(folder, builder)
        assert f"rank0.engine: {name} is not what" in str(caught.value)
        change_byte(folder / "rank0.engine", tensors[name].numpy().tobytes(), 70)


def test_weights_are_compared_when_asked(signed, builder):
    change_byte(signed / "rank0.engine", struct.pack("<f", 33.0))
    require_signed(signed, builder)
    with pytest.raises(UntrustedEngine, match="a weight is not what"):
        require_signed(signed, builder, with_weights=True)


def test_another_key_is_refused(signed, builder, tmp_path):
    other = make_ssh_key(tmp_path / "other")
    with pytest.raises(UntrustedEngine) as caught:
        require_signed(signed, PublicKey.read(Path(f"{other}.pub")))
    assert f"is signed by {builder.fingerprint}; a signature of SHA256:" in str(caught.value)
    # Signed again by the other key, under the builder's name.
    sign_engine(signed, SigningKey.read(other))
    edit(signed, lambda content: content.update(public_key=builder.line))
    with pytest.raises(UntrustedEngine, match="is not a signature of"):
        require_signed(signed, builder)


def test_an_unsigned_engine_is_refused_where_a_builder_is_asked_for(tmp_path, builder):
    folder = write_engine_files(tmp_path / "engine")
    with pytest.raises(UntrustedEngine, match="is not signed"):
        require_signed(folder, builder)
    assert describe_signature(folder) == {"state": "unsigned", "key": None, "problem": None}
    for ask in (describe_signature, lambda path: require_signed(path, builder)):
        with pytest.raises(EngineNotFound):
            ask(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.update(signature=base64.b64encode(bytes(64)).decode()),
        lambda c: c.update(signature=c["signature"][:-4]),
        lambda c: c.update(signature="no base64"),
        lambda c: c.update(signature=None),
        lambda c: c["document"].update(config_sha256="0" * 64),
        lambda c: c["document"]["engines"].clear(),
        lambda c: c["document"].clear(),
        lambda c: c.update(document=[]),
        lambda c: c.update(format="llmctl engine signature 2"),
        lambda c: c.update(public_key="ssh-rsa AAAA"),
        lambda c: c.update(public_key=None),
        lambda c: c.pop("document"),
        lambda c: c.update(more=1),
    ],
)
def test_a_replaced_or_edited_signature_is_refused(signed, builder, change):
    edit(signed, change)
    with pytest.raises(UntrustedEngine) as caught:
        require_signed(signed, builder)
    assert str(signed / SIGNATURE_FILE) in str(caught.value)
    assert describe_signature(signed)["state"] == "invalid"


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"config_sha256": 3, "engines": [], "tokenizer": {}},
        {"engines": {"../../x": {}}, "tokenizer": {}},
        {"engines": {"rank0.engine": {"bytes": "x"}}, "tokenizer": {}},
        {"engines": {"rank0.engine": None}, "tokenizer": {}},
    ],
)
def test_a_document_of_a_stranger_leads_to_nothing_but_invalid(signed, key, document):
    """Signed by the key that it names, so that only its form is wrong."""
    from llmctl.builder import signature

    own = SigningKey.read(key)
    true = json.loads((signed / SIGNATURE_FILE).read_text())["document"]
    document = {"config_sha256": true["config_sha256"]} | document
    mark = base64.b64encode(own.sign(signature._message(document))).decode()
    edit(signed, lambda content: content.update(document=document, signature=mark))
    assert describe_signature(signed)["state"] == "invalid"


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, '{"format": NaN}', "null"])
def test_a_signature_file_that_is_no_signature_is_refused(signed, builder, text):
    (signed / SIGNATURE_FILE).write_text(text)
    with pytest.raises(UntrustedEngine, match="is no signature of an engine"):
        require_signed(signed, builder)


def test_without_the_library_the_fix_is_its_command(signed, key, builder, monkeypatch):
    fingerprint = builder.fingerprint
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "cryptography", None)
    for read, path in ((SigningKey.read, key), (PublicKey.read, Path(f"{key}.pub"))):
        with pytest.raises(MissingPackage) as caught:
            read(path)
        assert caught.value.fix == "pip install 'llmctl[sign]'"
    described = describe_signature(signed)
    assert described["state"] == "unchecked" and described["key"] == fingerprint
    assert "pip install" in str(described["problem"])
