"""Which tokens' attention is computed with FP8 products, in engines built with that option.

A function of a sequence's prompt alone: whole groups of the prompt's tokens, the last token never
among them. So what a token is computed with does not depend on how its prompt is divided into
steps, on what else runs, on drafts, or on whether keys were there already or are computed again;
and whatever is generated is computed with 16-bit products.
"""

from __future__ import annotations

# Tokens. More than any chain or tree of drafts that kernels for short requests compute, so those
# need not know of this; and whole blocks of rows of the kernels for prompts.
GROUP = 256


def context_end(num_prompt_tokens: int, group: int = GROUP) -> int:
    """The first position of a sequence whose attention has 16-bit products; group 0: the first of
    all."""
    return (num_prompt_tokens - 1) // group * group if group else 0
