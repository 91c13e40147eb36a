"""Text to token ids and back, from tokenizer.json alone.

The `tokenizers` library loads in a hundredth of the time transformers takes. Tests compare ids and
texts with AutoTokenizer's, which also lets tokenizer.json decide about bos and eos and ignores
add_bos_token and add_eos_token beside it. Chat templates go through transformers itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from llmctl.builder.engine_format import TOKENIZER_FOLDER, EngineConfig
from llmctl.builder.tokenizer import TOKENIZER_FILE, describe_tokenizer, file_sha256
from llmctl.errors import BadConfig, CorruptEngine, TokenizerError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are no UTF-8, or not all there yet


class Tokenizer:
    """One tokenizer folder. Raises TokenizerError when it is missing or unreadable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json",
                fix="name the folder of the model's tokenizer with --tokenizer-dir",
            )
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for any bad file
            raise TokenizerError(f"{path} is not a tokenizer: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        self._config = _read_config(folder / "tokenizer_config.json")
        self._add_named_special_tokens()

    @property
    def end_id(self) -> int | None:
        """The id that ends a text; None when the tokenizer names none."""
        return self._special_id("eos_token")

    @property
    def pad_id(self) -> int | None:
        """The padding id, or the end id when there is none."""
        pad = self._special_id("pad_token")
        return self.end_id if pad is None else pad

    @property
    def ordinary_ids(self) -> list[int]:
        """Every id but those of special tokens, ascending."""
        special = {
            index
            for index, token in self._backend.get_added_tokens_decoder().items()
            if token.special
        }
        return sorted(set(self._backend.get_vocab().values()) - special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of one text. Raises BadConfig for half of a surrogate pair (JSON has it)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise BadConfig(f"{text[:40]!r} cannot be written as UTF-8: {error.reason}") from error
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
        return text

    def decode_so_far(self, token_ids: Sequence[int]) -> str:
        """The text of an unfinished output, without a last character whose bytes are incomplete."""
        return self.decode(token_ids).rstrip(_REPLACEMENT)

    def chat_prompt(self, message: str) -> list[int]:
        """One user message in the model's chat template, ready for the reply.

        Raises TokenizerError when there is no template.
        """
        full = self._full
        if not full.chat_template:
            raise TokenizerError(
                f"the tokenizer in {self.folder} has no chat template",
                fix="leave out --chat, or name a tokenizer that has one with --tokenizer-dir",
            )
        messages = [{"role": "user", "content": message}]
        try:
            text = full.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs of the model's author
            raise TokenizerError(f"the chat template in {self.folder} fails: {error}") from error
        assert isinstance(text, str)
        return self.encode(text, add_special_tokens=False)

    @cached_property
    def _full(self) -> PreTrainedTokenizerBase:
        """The same folder as transformers reads it. Raises TokenizerError where it cannot."""
        from transformers import AutoTokenizer

        try:
            full: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever it meets in a file that says other than it expects
            raise TokenizerError(
                f"transformers cannot read the tokenizer in {self.folder}: {error}"
            ) from error
        return full

    def _special_token(self, name: str) -> str | None:
        value = self._config.get(name)
        if isinstance(value, dict):  # older files store the AddedToken's fields
            value = value.get("content")
        return value if isinstance(value, str) else None

    def _special_id(self, name: str) -> int | None:
        token = self._special_token(name)
        if token is None:
            return None
        found: int | None = self._backend.token_to_id(token)
        return found

    def _add_named_special_tokens(self) -> None:
        """Tokens that tokenizer_config.json calls special are so even if tokenizer.json is
        silent: never split, left out of decoded text."""
        known = {token.content for token in self._backend.get_added_tokens_decoder().values()}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            token = self._special_token(name)
            if token in known or token is None:
                continue
            if self._backend.token_to_id(token) is not None:
                self._backend.add_special_tokens([AddedToken(token, special=True)])


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise TokenizerError(f"{path} holds no JSON object")
    return config


def tokenizer_hash(folder: Path) -> str | None:
    """The hash of a folder's tokenizer.json, as engines record it."""
    found: str | None = describe_tokenizer([folder / TOKENIZER_FILE])["hash"]
    return found


def engine_tokenizer(engine_dir: Path, config: EngineConfig) -> Tokenizer:
    """The tokenizer inside an engine. Raises CorruptEngine for another than it was built with: ids
    of one mean other text to the model."""
    folder = engine_dir / TOKENIZER_FOLDER
    tokenizer = Tokenizer(folder)
    if file_sha256(folder / TOKENIZER_FILE) == config.tokenizer.get("sha256"):
        return tokenizer  # reading what a large one means takes half a second
    wanted, found = config.tokenizer["hash"], tokenizer_hash(folder)
    if wanted not in (None, found):
        raise CorruptEngine(
            f"{folder} has a tokenizer of hash {str(found)[:12]}; the engine was built with one of "
            f"{wanted[:12]}",
            fix="build the engine again, or name the right tokenizer with --tokenizer-dir",
        )
    return tokenizer
