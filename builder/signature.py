"""signature.json of an engine directory: who built it, and what exactly.

    {"format": ..., "document": {...}, "public_key": "ssh-ed25519 ...", "signature": base64}

The document has the sha256 of everything that decides what opening the engine does: config.json,
each engine file's header (the plan, and names, dtypes, shapes and places of all tensors), every
cubin and TensorRT plan, and the tokenizer's files. Those are compared whenever a trusted builder is
given, in milliseconds. The sha256 of each whole engine file is in it, too, for the weights' values;
it takes about a second per gigabyte and is compared only on request.

What is signed is the document as canonical JSON: sorted keys, no spaces, ASCII.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, BinaryIO

from llmctl.builder.container import MAX_HEADER_BYTES
from llmctl.builder.engine_format import CONFIG_FILE, TOKENIZER_FOLDER, config_path
from llmctl.builder.plan import CODE_PREFIXES
from llmctl.builder.signing_keys import PublicKey, SigningKey, fingerprint_of
from llmctl.errors import LlmctlError, MissingPackage, UntrustedEngine
from llmctl.quantize.format import not_a_file, read_json

SIGNATURE_FILE = "signature.json"
FORMAT = "llmctl engine signature 1"
_ENGINES = "*.engine"
_FIELDS = {"format", "document", "public_key", "signature"}
_CHUNK_BYTES = 1 << 20
# What values of another form than is wanted may lead to, wherever they are used first.
_OTHER_FORM = (
    AttributeError,
    IndexError,
    KeyError,
    OSError,
    OverflowError,
    RecursionError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Signature:
    """signature.json as read: nothing in it is checked yet."""

    path: Path
    document: Mapping[str, Any]
    message: bytes  # the document as it is signed
    public_key: str
    signature: bytes

    @property
    def fingerprint(self) -> str:
        """Of the key that it names."""
        return fingerprint_of(self.public_key)


def sign_engine(folder: Path, key: SigningKey) -> None:
    """Write signature.json over what the engine directory holds. Reads the whole engine."""
    document = {
        "config_sha256": _sha256(folder / CONFIG_FILE),
        "engines": {path.name: _describe(path) for path in sorted(folder.glob(_ENGINES))},
        "tokenizer": {name: _sha256(path) for name, path in _tokenizer_files(folder)},
    }
    content = {
        "format": FORMAT,
        "document": document,
        "public_key": key.public.line,
        "signature": base64.b64encode(key.sign(_message(document))).decode(),
    }
    (folder / SIGNATURE_FILE).write_text(json.dumps(content, indent=2) + "\n")


def require_signed(folder: Path, builder: PublicKey, *, with_weights: bool = False) -> None:
    """Refuse an engine directory unless `builder` signed it and it is what was signed.

    Nothing in it but signature.json is interpreted before its hash has been compared.
    with_weights: compare the weights' values, too. Raises EngineNotFound and UntrustedEngine.
    """
    config_path(folder)
    signature = _read_signature(folder)
    if signature is None:
        raise UntrustedEngine(
            f"{folder} is not signed; a signature of {builder.fingerprint} is wanted",
            fix="have it built with `llmctl build --sign KEYFILE`, or leave out --trusted-builder",
        )
    if signature.public_key != builder.line:
        raise UntrustedEngine(
            f"{folder} is signed by {signature.fingerprint}; a signature of {builder.fingerprint} "
            "is wanted",
            fix="give the key of who built it, if you trust them: --trusted-builder KEYFILE",
        )
    if not builder.has_signed(signature.message, signature.signature):
        raise _changed(f"{signature.path} is not a signature of {builder.fingerprint}")
    try:
        found = next(_differences(folder, signature.document, with_weights), None)
    except _OTHER_FORM as error:
        raise _changed(f"{folder} cannot be compared with its signature: {error!r}") from error
    if found is not None:
        raise _changed(f"{folder / found} is not what {builder.fingerprint} signed")


def describe_signature(folder: Path) -> dict[str, str | None]:
    """{"state", "key", "problem"} for people. State: unsigned; valid: by the key that it names
    itself, whoever that is; invalid, or unchecked for want of a package, with the problem.

    Raises EngineNotFound.
    """
    config_path(folder)
    described: dict[str, str | None] = {"state": "unsigned", "key": None, "problem": None}
    try:
        signature = _read_signature(folder)
        if signature is None:
            return described
        described["key"] = signature.fingerprint
        require_signed(folder, PublicKey.parse(signature.public_key))
    except MissingPackage as error:
        return described | {"state": "unchecked", "problem": f"{error}; {error.fix}"}
    except (UntrustedEngine, ValueError) as error:  # or its key is none
        return described | {"state": "invalid", "problem": str(error)}
    return described | {"state": "valid"}


def _read_signature(folder: Path) -> Signature | None:
    """None where there is none. Raises UntrustedEngine for a file of another form."""
    path = folder / SIGNATURE_FILE
    if (found := not_a_file(path)) is not None:
        raise _changed(f"{path} is {found}; a file is wanted")
    if not path.exists():
        return None
    try:
        raw = read_json(path)
        if set(raw) != _FIELDS or raw["format"] != FORMAT:
            raise ValueError(f"the fields {', '.join(sorted(_FIELDS))} and {FORMAT!r} are wanted")
        if not isinstance(raw["document"], dict) or not isinstance(raw["public_key"], str):
            raise ValueError("its document is no object, or its key no text")
        fingerprint_of(raw["public_key"])
        signature = base64.b64decode(raw["signature"], validate=True)
        message = _message(raw["document"])
    except (*_OTHER_FORM, LlmctlError) as error:
        raise _changed(f"{path} is no signature of an engine: {error}") from error
    return Signature(path, raw["document"], message, raw["public_key"], signature)


def _message(document: Mapping[str, Any]) -> bytes:
    """The bytes that are signed. The format is part of them, so that they mean nothing else."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return f"{FORMAT}\n{text}".encode()


def _differences(folder: Path, document: Mapping[str, Any], with_weights: bool) -> Iterator[str]:
    """What in the directory is not what the document, which is the builder's, says."""
    if _sha256(folder / CONFIG_FILE) != document["config_sha256"]:
        yield CONFIG_FILE
    engines = document["engines"]
    yield from sorted(engines.keys() ^ {path.name for path in folder.glob(_ENGINES)})
    for name, wanted in engines.items():
        path = folder / name
        if not path.is_file():  # to open a pipe waits for ever
            yield name
            return
        with path.open("rb") as file:
            raw = _read_header(file)
            size = path.stat().st_size
            if (size, sha256(raw).hexdigest()) != (wanted["bytes"], wanted["header_sha256"]):
                yield name
                return  # the header says where the code is
            for tensor, digest in _code_digests(file, raw):
                if wanted["code"].get(tensor) != digest:
                    yield f"{name}: {tensor}"
            if with_weights:
                file.seek(0)
                if file_digest(file, "sha256").hexdigest() != wanted["sha256"]:
                    yield f"{name}: a weight"
    present = dict(_tokenizer_files(folder))
    wanted_files = document["tokenizer"]
    for name in sorted(wanted_files.keys() | present.keys()):
        found = _sha256(present[name]) if name in present else None
        if found is None or found != wanted_files.get(name):
            yield f"{TOKENIZER_FOLDER}/{name}"


def _describe(path: Path) -> dict[str, Any]:
    """The document's record of an engine file."""
    with path.open("rb") as file:
        raw = _read_header(file)
        code = dict(_code_digests(file, raw))
        file.seek(0)
        whole = file_digest(file, "sha256").hexdigest()
    return {
        "bytes": path.stat().st_size,
        "header_sha256": sha256(raw).hexdigest(),
        "code": code,
        "sha256": whole,
    }


def _read_header(file: BinaryIO) -> bytes:
    """The header with its length, as bytes: whose it is is not known yet."""
    prefix = file.read(8)
    return prefix + file.read(min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES))


def _code_digests(file: BinaryIO, raw: bytes) -> Iterator[tuple[str, str]]:
    """(tensor, sha256) of every cubin and TensorRT plan, by a header that is to be trusted."""
    left = os.fstat(file.fileno()).st_size - len(raw)
    for name, entry in json.loads(raw[8:]).items():
        if name.startswith(CODE_PREFIXES):
            begin, end = entry["data_offsets"]
            left -= end - begin
            if not 0 <= begin <= end or left < 0:
                raise ValueError(f"{name} is at bytes {begin} to {end}")
            file.seek(len(raw) + begin)
            yield name, _hash_bytes(file, end - begin)


def _hash_bytes(file: BinaryIO, num_bytes: int) -> str:
    """sha256 of what comes next in the file."""
    total = sha256()
    while num_bytes > 0 and (chunk := file.read(min(num_bytes, _CHUNK_BYTES))):
        total.update(chunk)
        num_bytes -= len(chunk)
    return total.hexdigest()


def _tokenizer_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """(name below the tokenizer's folder, path) of all that lies there: a chat template is a
    program."""
    top = folder / TOKENIZER_FOLDER
    for path in sorted(top.rglob("*")):
        if not path.is_dir() or path.is_symlink():
            yield path.relative_to(top).as_posix(), path


def _sha256(path: Path) -> str | None:
    """None for what cannot be read as a file: a pipe would be waited for, a device has no end."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return file_digest(file, "sha256").hexdigest()
    except OSError:
        return None


def _changed(what: str) -> UntrustedEngine:
    return UntrustedEngine(what, fix="get the engine from its builder again")
