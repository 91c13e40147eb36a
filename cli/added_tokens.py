"""The tokens that a tokenizer's other files add to tokenizer.json, or change the flags of.

As transformers reads them: tokenizer_config.json names the special tokens and may list every added
one (`added_tokens_decoder`); where it does not, special_tokens_map.json and added_tokens.json of
older exporters speak, and the names of the former replace those of tokenizer_config.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken

from llmctl.builder.tokenizer import SPECIAL_TOKENS, TOKENIZER_CONFIG_FILE, TOKENIZER_FILE
from llmctl.errors import CorruptFile, TokenizerError
from llmctl.quantize.format import clipped, has_file, read_json, shown

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FIX = "fetch the tokenizer files again"
_MAP_FILE, _ADDED_FILE = "special_tokens_map.json", "added_tokens.json"
_FLAGS = ("special", "lstrip", "rstrip", "single_word", "normalized")
_LISTED = "added_tokens_decoder"
_EXTRA, _OLD_EXTRA = "extra_special_tokens", "additional_special_tokens"  # one meaning, two names


def add_tokens(backend: Tokenizer, folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Give `backend`, which has the added tokens of tokenizer.json, those of the whole folder,
    whose tokenizer_config.json is `config`. Returns the special tokens by name ("eos_token").

    A token that nothing has an id of gets the next one. Raises TokenizerError for what is no
    token, and for an eos_token that would get one: the model does not know it.
    """
    path = folder / TOKENIZER_CONFIG_FILE
    names, others, extra = _special(config, path)
    if _LISTED in config:
        listed = _listed(config[_LISTED] or {}, path)
    else:
        path = folder / _MAP_FILE
        older = _document(path)
        more_names, more_others, more_extra = _special(older, path)
        names, others = names | more_names, more_others | others
        is_old = not older.get(_EXTRA)  # taken where tokenizer_config.json has none, and too late
        extra += [] if is_old else more_extra  # for the flags of added_tokens.json
        special = {token.content for token in [*names.values(), *extra]}
        if is_old and not extra and isinstance(config.get(_EXTRA, {}), dict):
            extra = more_extra
        listed = _numbered(_document(folder / _ADDED_FILE), special, folder / _ADDED_FILE)
        listed |= backend.get_added_tokens_decoder()
    names = {name: names[name] for name in SPECIAL_TOKENS if name in names} | others
    tokens = [token for _, token in sorted(listed.items())]
    known = {token.content for token in tokens}
    known |= {token.content for token in backend.get_added_tokens_decoder().values()}
    more: dict[tuple[str, bool], AddedToken] = {}  # one of a text as such, one with flags
    for token in [*names.values(), *extra]:
        if token.content not in known:
            more.setdefault((token.content, _has_flags(token)), token)
    tokens += more.values()
    end = names.get("eos_token")
    if end and end.content not in known and backend.token_to_id(end.content) is None:
        raise TokenizerError(
            f"{path} names {shown(end.content)} as eos_token, which {TOKENIZER_FILE} does not "
            "have: no text would end",
            fix=_FIX,
        )
    named = {token.content for token in names.values()}
    for token in tokens:
        token.special = token.special or token.content in named
    backend.add_tokens(tokens)
    return {name: token.content for name, token in names.items()}


def _special(
    fields: Mapping[str, Any], path: Path
) -> tuple[dict[str, AddedToken], dict[str, AddedToken], list[AddedToken]]:
    """The special tokens of a document: by the usual names, by others, and those without one."""
    names = {name: fields[name] for name in SPECIAL_TOKENS if fields.get(name) is not None}
    others = {
        name: value  # a vision model's image_token
        for kind in (dict, str)
        for name, value in fields.items()
        if name.endswith("_token") and name not in SPECIAL_TOKENS and isinstance(value, kind)
    }
    extra = fields.get(_EXTRA) or fields.get(_OLD_EXTRA) or []
    if isinstance(extra, dict):
        others, extra = others | extra, fields.get(_OLD_EXTRA) or []
    if not isinstance(extra, list):
        raise _no_token(extra, _EXTRA, path)
    return (
        {name: _token(value, name, path) for name, value in names.items()},
        {name: _token(value, name, path) for name, value in others.items()},
        [_token(value, _EXTRA, path) for value in extra],
    )


def _listed(found: Any, path: Path) -> dict[int, AddedToken]:
    """`added_tokens_decoder`: the fields of a token by its id."""
    if not isinstance(found, dict):
        raise _no_token(found, _LISTED, path)
    try:
        return {int(index): _fields(value) for index, value in found.items()}
    except (TypeError, ValueError) as error:
        raise _no_token(found, _LISTED, path) from error


def _numbered(
    found: Mapping[str, Any], special: Iterable[str], path: Path
) -> dict[int, AddedToken]:
    """added_tokens.json: an id by token."""
    tokens = {}
    for content, index in found.items():
        if type(index) is not int:
            raise _no_token(index, content, path)
        is_special = content in special
        tokens[index] = AddedToken(content, normalized=not is_special, special=is_special)
    return tokens


def _token(value: Any, name: str, path: Path) -> AddedToken:
    if isinstance(value, str):
        return AddedToken(value, special=True)
    try:
        return _fields(value)
    except (TypeError, ValueError) as error:
        raise _no_token(value, name, path) from error


def _fields(value: Any) -> AddedToken:
    if not isinstance(value, dict) or not isinstance(value.get("content"), str):
        raise TypeError(f"{type(value).__name__} is no token")
    # Of an unknown field the library would print a remark, on stdout.
    return AddedToken(**{key: value[key] for key in ("content", *_FLAGS) if key in value})


def _has_flags(token: AddedToken) -> bool:
    return any(getattr(token, flag) for flag in _FLAGS[1:])


def _document(path: Path) -> dict[str, Any]:
    try:
        return read_json(path) if has_file(path) else {}
    except CorruptFile as error:
        raise TokenizerError(str(error), fix=_FIX) from error


def _no_token(value: Any, name: str, path: Path) -> TokenizerError:
    return TokenizerError(
        f"cannot read the tokenizer in {path.parent}: {clipped(name)} of {path.name} is "
        f"{shown(value)}; text, or an object with `content`, is wanted for a token",
        fix=_FIX,
    )
