"""tokenizer.json of a stranger, opened and used through the `tokenizers` library.

The library is written in Rust: what it does not expect in a file it reports as plain Exception or,
in places, as a panic, which reaches Python as a BaseException.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from llmctl.errors import CorruptFile, TokenizerError
from llmctl.quantize.format import MAX_JSON_BYTES, parse_json
from llmctl.quantize.strict_json import clipped

if TYPE_CHECKING:
    from tokenizers import Tokenizer

T = TypeVar("T")
_FIX = "fetch the tokenizer files again"
_MOST_GROWTH = 64
_CHARSMAP = "precompiled_charsmap"


def open_tokenizer(path: Path) -> tuple[Tokenizer, str | None]:
    """The tokenizer of a tokenizer.json, without its truncation and padding, and the token that it
    would pad with.

    Raises TokenizerError for one that the library cannot read, or that gives other ids for the same
    text each time (BPE dropout).
    """
    from tokenizers import Tokenizer

    if path.stat().st_size > MAX_JSON_BYTES:
        raise TokenizerError(
            f"{path} has {path.stat().st_size} bytes; at most {MAX_JSON_BYTES} are read", fix=_FIX
        )
    data = path.read_bytes()
    if _CHARSMAP.encode() in data:
        _check_charsmaps(data, path)
    opened: Tokenizer = guarded(lambda: Tokenizer.from_buffer(data), f"{path} is not a tokenizer")
    for part in (opened.normalizer, opened.decoder):
        if part is not None:
            _check_growth(json.loads(part.__getstate__()), path)
    opened.no_truncation()
    padding = opened.padding
    opened.no_padding()
    dropout = getattr(opened.model, "dropout", None)
    if dropout:
        raise TokenizerError(
            f"{path} drops merges at random (dropout {dropout}); null is wanted", fix=_FIX
        )
    return opened, None if padding is None else padding["pad_token"]


def guarded(call: Callable[[], T], what: str) -> T:
    """The result of a call of the library. Raises TokenizerError ("<what>: <reason>")."""
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerError(f"{what}: {clipped(str(error), 400)}", fix=_FIX) from error


def _check_charsmaps(data: bytes, path: Path) -> None:
    """Raises TokenizerError for a SentencePiece normalizer whose table is longer than its bytes:
    the library would allocate what the table claims."""
    try:
        document = parse_json(data, str(path))
    except CorruptFile as error:
        raise TokenizerError(str(error), fix=_FIX) from error
    for value in _charsmaps(document.get("normalizer")):
        try:
            table = base64.b64decode(value, validate=True)
        except (binascii.Error, TypeError, ValueError):
            table = b""
        size = int.from_bytes(table[:4], "little")
        if len(table) < 4 or size % 4 or size > len(table) - 4:
            raise TokenizerError(
                f"{path} is not a tokenizer: {_CHARSMAP} has {len(table)} bytes and tells of "
                f"{size} in its table",
                fix=_FIX,
            )


def _check_growth(part: dict[str, Any], path: Path) -> None:
    """Raises TokenizerError for replacements that make much of a little text: each may write what
    the next replaces, and one of nothing writes for ever."""
    growth = 1.0
    for replace in _parts(part, "Replace"):
        pattern, content = replace["pattern"], replace["content"]
        length = len(pattern.get("String", "x"))  # a regular expression may match one character
        growth *= max(1.0, len(content) / length) if length else math.inf
    if growth > _MOST_GROWTH:
        raise TokenizerError(
            f"{path} is not a tokenizer: its replacements make {growth:g} characters of one; at "
            f"most {_MOST_GROWTH} are taken",
            fix=_FIX,
        )


def _parts(part: dict[str, Any], kind: str) -> Iterator[dict[str, Any]]:
    """The parts of that type in a normalizer or a decoder, which may be a sequence of others."""
    if part.get("type") == kind:
        yield part
    for inner in (*part.get("normalizers", ()), *part.get("decoders", ())):
        yield from _parts(inner, kind)


def _charsmaps(part: Any) -> Iterator[Any]:
    """Every table in a normalizer, or in the parts of one."""
    if isinstance(part, dict):
        if _CHARSMAP in part:
            yield part[_CHARSMAP]
        for item in part.get("normalizers") or ():
            yield from _charsmaps(item)
