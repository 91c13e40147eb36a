"""Ed25519 keys that sign engines, in the forms that ssh-keygen and openssl write.

The library `cryptography`, of the extra `sign`, reads them, signs and checks; only a fingerprint is
computed without it.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from llmctl.errors import BadKey, MissingPackage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import (
        Ed25519PrivateKey,
        Ed25519PublicKey,
    )

MAX_KEY_BYTES = 64 << 10  # a key takes a few hundred
_PRIVATE = b"PRIVATE KEY-----"  # ends the first line of both forms
KEY_TYPE = "ssh-ed25519"
_NEW_KEY = "ssh-keygen -t ed25519 -N '' -C '' -f llmctl-key"


@dataclass(frozen=True, slots=True)
class SigningKey:
    """The private half of a key pair."""

    _key: Ed25519PrivateKey

    @classmethod
    def read(cls, path: Path) -> SigningKey:
        """From an OpenSSH or a PEM (PKCS 8) file without a passphrase. Raises BadKey and
        MissingPackage."""
        data = _read_file(path)
        if _PRIVATE not in data:
            raise BadKey(
                f"{path} holds no private key in OpenSSH or PEM form",
                fix=f"give the private half of the pair; a new pair: {_NEW_KEY}",
            )
        return cls(_load(path, data, "private", _NEW_KEY))

    @property
    def public(self) -> PublicKey:
        """The half that others check signatures with."""
        return PublicKey(self._key.public_key())

    def sign(self, message: bytes) -> bytes:
        """The signature, 64 bytes."""
        signature: bytes = self._key.sign(message)
        return signature


@dataclass(frozen=True, slots=True)
class PublicKey:
    """The public half of a key pair."""

    _key: Ed25519PublicKey

    @classmethod
    def read(cls, path: Path) -> PublicKey:
        """From an OpenSSH (.pub) or a PEM file of one key. Raises BadKey and MissingPackage."""
        data = _read_file(path)
        if _PRIVATE in data:
            raise BadKey(
                f"{path} holds a private key; the public half is what a builder gives to others",
                fix=f"ssh-keygen -y -f {path} > {path}.pub, and give that file",
            )
        lines = [line for line in data.splitlines() if line.strip()]
        if b"-----BEGIN" not in data and len(lines) != 1:
            raise BadKey(f"{path} has {len(lines)} lines; one public key is wanted")
        return cls(_load(path, data, "public", f"give the .pub file that {_NEW_KEY} writes"))

    @classmethod
    def parse(cls, line: str) -> PublicKey:
        """From "ssh-ed25519 BASE64". Raises ValueError, and MissingPackage."""
        from_line = _loader(line.encode(), "public")
        from cryptography.exceptions import UnsupportedAlgorithm

        try:
            key = from_line(line.encode())
        except UnsupportedAlgorithm as error:
            raise ValueError(str(error)) from error
        if not isinstance(key, _types()[1]):
            raise ValueError(f"no {KEY_TYPE} key")
        return cls(key)

    @property
    def line(self) -> str:
        """ "ssh-ed25519 BASE64", the form of a .pub file."""
        serialization = _serialization()
        form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        line: bytes = self._key.public_bytes(*form)
        return line.decode()

    @property
    def fingerprint(self) -> str:
        """ "SHA256:…", as `ssh-keygen -lf` prints it."""
        return fingerprint_of(self.line)

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether the signature is this key's, of exactly this message."""
        from cryptography.exceptions import InvalidSignature

        try:
            self._key.verify(signature, message)
        except InvalidSignature:
            return False
        return True


def fingerprint_of(line: str) -> str:
    """ "SHA256:…" of a public key in the form of `PublicKey.line`. Raises ValueError."""
    kind, _, text = line.partition(" ")
    try:
        blob = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"no base64: {error}") from error
    if kind != KEY_TYPE or not blob:
        raise ValueError(f"no {KEY_TYPE} key")
    return "SHA256:" + base64.b64encode(sha256(blob).digest()).decode().rstrip("=")


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise BadKey(
            f"the key {path} cannot be read: {error.strerror}",
            fix="see that this file exists and that you may read it",
        ) from error
    if len(data) > MAX_KEY_BYTES:
        raise BadKey(f"{path} is no key: it has over {MAX_KEY_BYTES} bytes")
    return data


def _load(path: Path, data: bytes, half: str, fix: str) -> Any:
    """The Ed25519 key of a file. half: "private" or "public"."""
    from_file = _loader(data, half)
    from cryptography.exceptions import UnsupportedAlgorithm

    is_private = half == "private"
    try:
        key = from_file(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if is_private and "password" in str(error).lower():
            raise BadKey(
                f"{path} is protected by a passphrase, which is not supported",
                fix=f"a copy without: cp {path} KEY && ssh-keygen -p -N '' -f KEY",
            ) from error
        raise BadKey(f"{path} is no readable {half} key: {error}", fix=fix) from error
    if not isinstance(key, _types()[0 if is_private else 1]):
        kind = type(key).__name__.strip("_").removesuffix(f"{half.capitalize()}Key")
        raise BadKey(f"{path} is a key of type {kind}; Ed25519 is wanted", fix=fix)
    return key


def _loader(data: bytes, half: str) -> Callable[[bytes], Any]:
    """What reads a file that begins like this one."""
    serialization = _serialization()
    is_pem = b"-----BEGIN" in data and b"OPENSSH" not in data
    load = getattr(serialization, f"load_{'pem' if is_pem else 'ssh'}_{half}_key")
    return cast(Callable[[bytes], Any], partial(load, password=None) if half == "private" else load)


def _types() -> tuple[type[Ed25519PrivateKey], type[Ed25519PublicKey]]:
    from cryptography.hazmat.primitives.asymmetric import ed25519

    return ed25519.Ed25519PrivateKey, ed25519.Ed25519PublicKey


def _serialization() -> Any:
    try:
        from cryptography.hazmat.primitives import serialization
    except ImportError as error:
        raise MissingPackage(
            "signatures need the package cryptography, which is not installed",
            fix="pip install 'llmctl[sign]'",
        ) from error
    return serialization
