"""Keys made by ssh-keygen and openssl, and a small engine directory to sign."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from llmctl.builder.container import Entry, write_container

CODE, WEIGHT = "kernel:sample", "w.weight"


def run_tool(*words: object) -> str:
    """Output of ssh-keygen or openssl."""
    if shutil.which(str(words[0])) is None:
        pytest.skip(f"{words[0]} is not installed")
    command = [str(word) for word in words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def make_ssh_key(path: Path, kind: str = "ed25519", passphrase: str = "") -> Path:
    """A pair of OpenSSH files, `path` and `path`.pub."""
    run_tool("ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-C", "a comment", "-f", path)
    return path


def make_pem_key(path: Path, kind: str = "ED25519") -> tuple[Path, Path]:
    """(private, public) PEM files of openssl."""
    private, public = path.with_suffix(".pem"), path.with_suffix(".pub.pem")
    run_tool("openssl", "genpkey", "-algorithm", kind, "-out", private)
    run_tool("openssl", "pkey", "-in", private, "-pubout", "-out", public)
    return private, public


def write_engine_files(folder: Path) -> Path:
    """What a signature covers, as an engine directory: a cubin, a weight, a tokenizer."""
    values = {
        CODE: torch.arange(192, dtype=torch.uint8),
        WEIGHT: torch.arange(64, dtype=torch.float32),
    }
    entries = [
        Entry(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        for name, value in values.items()
    ]

    def chunks(name: str) -> Iterator[torch.Tensor]:
        yield values[name]

    (folder / "tokenizer").mkdir(parents=True)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}")
    (folder / "config.json").write_text('{"version": 8}')
    write_container(folder / "rank0.engine", entries, {"plan": "{}"}, chunks, lambda _: None)
    return folder


def change_byte(path: Path, content: bytes, offset: int = 0) -> None:
    """Change the byte `offset` bytes after where `content` begins in the file."""
    data = bytearray(path.read_bytes())
    assert data.count(content) == 1
    data[data.index(content) + offset] ^= 1
    path.write_bytes(data)
