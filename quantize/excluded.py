"""The modules that a checkpoint's config excludes from its quantization: patterns of a stranger.

ModelOpt writes names and wildcards, compressed-tensors names and regular expressions.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from llmctl.errors import UnknownQuantization
from llmctl.quantize.strict_json import shown

# Python's matcher tries choices in all combinations; these bounds keep that below a second.
_MOST_CHARS, _MOST_CHOICES = 256, (4, 12, 4)  # repetitions, alternatives, groups
_MOST_EXCLUDED = 10_000  # names and patterns, each tried on every module
_ESCAPE = re.compile(r"\\.|\[\^?\]?[^\]]*\]", re.DOTALL)  # an escaped character, a set of them
_QUANTIFIER = re.compile(r"(?<![(*+?}])(\*|\+|\?|\{\d*,?\d*\})")
_REPEATED_GROUP = re.compile(r"\)(\*|\+|\{)")


def excluded_modules(value: Any, where: str) -> tuple[str, ...]:
    """The patterns of a config, none for None. Raises UnknownQuantization for what is no list of
    names, or too long a one."""
    values = [] if value is None else value
    if not isinstance(values, list) or not all(isinstance(item, str) for item in values):
        raise UnknownQuantization(f"{where}: the excluded modules are not a list of names")
    if len(values) > _MOST_EXCLUDED:
        raise UnknownQuantization(
            f"{where}: {len(values)} modules are excluded; at most {_MOST_EXCLUDED} are read"
        )
    return tuple(values)


def matches(pattern: str, module: str) -> bool:
    """Whether a pattern of an exporter, a name, wildcards or `re:` and an expression, is of a
    module or of one around it. Raises UnknownQuantization for an expression as below."""
    if pattern.startswith("re:"):
        return _expression(pattern[3:]).match(module) is not None
    return fnmatchcase(module, pattern) or module.startswith(pattern + ".")


@cache
def _expression(text: str) -> re.Pattern[str]:
    """A checkpoint's regular expression. Raises UnknownQuantization for one that is none, or that
    could search for longer than anybody waits: few choices, and none within a repetition."""
    bare = _ESCAPE.sub("x", text)
    choices = len(_QUANTIFIER.findall(bare)), bare.count("|"), bare.count("(")
    is_simple = all(found <= most for found, most in zip(choices, _MOST_CHOICES, strict=True))
    if len(text) > _MOST_CHARS or not is_simple or _REPEATED_GROUP.search(bare):
        raise UnknownQuantization(
            f"the exclusion {shown('re:' + text)} is too involved to be tried on every module: at "
            f"most {_MOST_CHARS} characters, {_MOST_CHOICES[0]} repetitions, {_MOST_CHOICES[1]} "
            f"alternatives and {_MOST_CHOICES[2]} groups are read, and no repetition of a group",
            fix="name the modules, or write a simpler expression",
        )
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UnknownQuantization(
            f"the exclusion {shown('re:' + text)} is not a regular expression: {error}"
        ) from error
