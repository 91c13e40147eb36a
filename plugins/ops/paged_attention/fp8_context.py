"""Which tokens' attention is computed with FP8 products, in engines built with that option.

Of prompts alone: a function of a sequence's prompt, whole groups of its tokens, the last token
never among them. So what a token is computed with does not depend on how its prompt is divided into
steps, on what else runs, on drafts, or on whether keys were there already or are computed again;
and whatever is generated is computed with 16-bit products.

Of all tokens: then there is nothing to tell apart. Prompts are read and reused as with 16-bit
products, and a sequence has no `context_end`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

# Tokens. More than any chain or tree of drafts that kernels for short requests compute, so those
# need not know of this; and whole blocks of rows of the kernels for prompts.
GROUP = 256


# Options of `llmctl build` and, where they are "enable", attributes of attention in plans.
OPTION, GENERATION = "use_fp8_context_fmha", "use_fp8_generation_fmha"
_ATTRIBUTES = {OPTION: "fp8_context", GENERATION: "fp8_generation"}


class Fp8Tokens(Enum):
    """Which tokens of an engine have FP8 products."""

    NONE = "none"
    PROMPTS = "prompts"
    ALL = "all"

    @property
    def group(self) -> int:
        """Tokens of a prompt that are read and reused together; 0: any number is."""
        return GROUP if self is Fp8Tokens.PROMPTS else 0

    @property
    def attributes(self) -> dict[str, bool]:
        """Of an attention operator; none is written where it is false."""
        names = {Fp8Tokens.NONE: (), Fp8Tokens.PROMPTS: (OPTION,), Fp8Tokens.ALL: _ATTRIBUTES}
        return {_ATTRIBUTES[name]: True for name in names[self]}


def fp8_tokens(attributes: Mapping[str, object]) -> Fp8Tokens:
    """Those of an attention operator."""
    return _fp8_tokens(*(bool(attributes.get(name, False)) for name in _ATTRIBUTES.values()))


def chosen_fp8(plugin_config: Mapping[str, object]) -> Fp8Tokens:
    """Those that options of `build` ask for. Older engines do not have both."""
    return _fp8_tokens(*(plugin_config.get(name) == "enable" for name in _ATTRIBUTES))


def _fp8_tokens(of_prompts: bool, of_generation: bool) -> Fp8Tokens:
    if not of_prompts:
        return Fp8Tokens.NONE
    return Fp8Tokens.ALL if of_generation else Fp8Tokens.PROMPTS


def context_end(num_prompt_tokens: int, group: int = GROUP) -> int:
    """The first position of a sequence whose attention has 16-bit products; group 0: the first of
    all."""
    return (num_prompt_tokens - 1) // group * group if group else 0
