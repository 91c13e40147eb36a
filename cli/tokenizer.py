"""Text to token ids and back, from tokenizer.json and what other files say of single tokens.

The `tokenizers` library loads in a hundredth of the time transformers takes. Tests compare ids and
texts with AutoTokenizer's, which also lets tokenizer.json decide about bos and eos and ignores
add_bos_token and add_eos_token beside it. transformers finds the chat template, and renders it in a
process of its own (`chat_template.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.builder.engine_format import TOKENIZER_FOLDER, EngineConfig
from llmctl.builder.tokenizer import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    describe_tokenizer,
    file_sha256,
    read_tokenizer_config,
)
from llmctl.cli.added_tokens import add_tokens
from llmctl.cli.chat_template import render
from llmctl.errors import BadConfig, CorruptEngine, LlmctlError, TokenizerError
from llmctl.quantize.format import clipped, not_a_file
from llmctl.quantize.tokenizer_file import guarded, open_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FETCH = "fetch the tokenizer files again"
# What transformers takes the leading space of, in this order, where a tokenizer asks for it.
_TIGHT = (".", "?", "!", ",", "n't", "'m", "'s", "'ve", "'re")
_REPLACEMENT = "\ufffd"  # what decoding makes of bytes that are no UTF-8, or not all there yet


class Tokenizer:
    """One tokenizer folder; option: of the command, which names another one ("": none does). Raises
    TokenizerError when it is missing or unreadable."""

    def __init__(self, folder: Path, option: str = "--tokenizer-dir") -> None:
        self.folder = folder
        self._fetch = f"{_FETCH}, or name others with {option}" if option else _FETCH
        if folder.is_file():
            wanted = f"{folder} is a file; the folder of a tokenizer is wanted"
            raise TokenizerError(wanted, fix=f"give {folder.parent}")
        path = folder / TOKENIZER_FILE
        found = not_a_file(path)
        if found is not None or not path.is_file():
            raise TokenizerError(
                f"{folder} has no tokenizer.json"
                if found is None
                else f"{path} is {found}; a file is wanted",
                fix=f"name the folder of the model's tokenizer with {option}" if option else _FETCH,
            )
        self._backend, pad_token = open_tokenizer(path)
        self._config = {"pad_token": pad_token} | read_tokenizer_config(
            folder / TOKENIZER_CONFIG_FILE
        )
        self._special = add_tokens(self._backend, folder, self._config)
        self._backend.encode_special_tokens = bool(self._config.get("split_special_tokens"))

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

        def encoded() -> list[int]:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
            return ids

        return guarded(encoded, f"the tokenizer in {self.folder} cannot encode the text")

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of the ids, special tokens left out."""

        def decoded() -> str:
            text: str = self._backend.decode(list(token_ids), skip_special_tokens=True)
            return text

        text = guarded(decoded, f"the tokenizer in {self.folder} cannot decode the output")
        return _cleaned(text) if self._cleans_up else text

    def decode_so_far(self, token_ids: Sequence[int]) -> str:
        """The text of an unfinished output, without a last character whose bytes are incomplete."""
        text = self.decode(token_ids)
        if not text.endswith(_REPLACEMENT):
            return text
        # Where tokens are bytes, an incomplete one makes replacements of all bytes just before it.
        end = len(token_ids)
        shorter = (self.decode(token_ids[: max(end - less, 0)]) for less in range(1, 4))
        return max((one.rstrip(_REPLACEMENT) for one in (text, *shorter)), key=len)

    def chat_prompt(self, message: str) -> list[int]:
        """One user message in the model's chat template, ready for the reply.

        Raises TokenizerError when there is no template, or one that fails.
        """
        (found,) = self.chat_prompts([message])
        if isinstance(found, LlmctlError):
            raise found
        return found

    def chat_prompts(self, messages: Sequence[str]) -> list[list[int] | LlmctlError]:
        """The token ids of each message in the template, or why it has none."""
        full = self._full
        if not full.chat_template:
            raise TokenizerError(
                f"the tokenizer in {self.folder} has no chat template",
                fix="leave out --chat, or name a tokenizer that has one with --tokenizer-dir",
            )
        try:
            template = full.get_chat_template()
        except Exception as error:  # a set of templates without the usual one
            raise TokenizerError(
                f"the tokenizer in {self.folder} has no chat template that is the usual one: "
                f"{clipped(str(error), 400)}",
                fix="leave out --chat, or name a tokenizer that has one with --tokenizer-dir",
            ) from error
        texts = render(template, dict(full.special_tokens_map), messages, str(self.folder))
        return [
            text if isinstance(text, LlmctlError) else self._in_template(text) for text in texts
        ]

    def _in_template(self, text: str) -> list[int] | LlmctlError:
        try:
            return self.encode(text, add_special_tokens=False)
        except LlmctlError as error:
            return error

    @cached_property
    def _full(self) -> PreTrainedTokenizerBase:
        """The same folder as transformers reads it. Raises TokenizerError where it cannot."""
        from transformers import AutoTokenizer, PreTrainedTokenizerBase

        try:
            full = AutoTokenizer.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
            if not isinstance(full, PreTrainedTokenizerBase):  # RAG's, which is two of them
                raise TypeError(f"a {type(full).__name__} is no tokenizer of one text")
        except Exception as error:  # whatever it meets in a file that says other than it expects
            raise TokenizerError(
                f"transformers cannot read the tokenizer in {self.folder}: "
                f"{clipped(str(error), 400)}",
                fix=self._fetch,
            ) from error
        return full

    @cached_property
    def _cleans_up(self) -> bool:
        # transformers asks twice before it does so to a BPE, whose spaces are those of the text.
        asks = "clean_up_tokenization_spaces"
        if type(self._backend.model).__name__ == "BPE":
            insists = f"{asks}_for_bpe_even_though_it_will_corrupt_output"
            return bool(self._config.get(asks) and self._config.get(insists))
        return bool(self._config.get(asks))

    def _special_id(self, name: str) -> int | None:
        token = self._special.get(name)
        if token is None:
            return None
        found: int | None = self._backend.token_to_id(token)
        return found


def _cleaned(text: str) -> str:
    for tight in _TIGHT:
        text = text.replace(f" {tight}", tight)
        if tight == ",":
            text = text.replace(" ' ", "'")
    return text


def tokenizer_hash(folder: Path) -> str | None:
    """The hash of a folder's tokenizer.json, as engines record it."""
    found: str | None = describe_tokenizer([folder / TOKENIZER_FILE])["hash"]
    return found


def engine_tokenizer(
    engine_dir: Path, config: EngineConfig, option: str = "--tokenizer-dir"
) -> Tokenizer:
    """The tokenizer inside an engine. Raises CorruptEngine for another than it was built with: ids
    of one mean other text to the model."""
    folder = engine_dir / TOKENIZER_FOLDER
    tokenizer = Tokenizer(folder, option)
    if file_sha256(folder / TOKENIZER_FILE) == config.tokenizer.get("sha256"):
        return tokenizer  # reading what a large one means takes half a second
    wanted, found = config.tokenizer["hash"], tokenizer_hash(folder)
    if wanted not in (None, found):
        raise CorruptEngine(
            f"{folder} has a tokenizer of hash {str(found)[:12]}; the engine was built with one of "
            f"{wanted[:12]}",
            fix="build the engine again"
            + (f", or name the right tokenizer with {option}" if option else ""),
        )
    return tokenizer
