"""Where a run of newly accepted tokens ends: end ids, stop words, length.

A run is scanned token by token in order, and everything after the first stop is dropped before
anything is committed, so tokens, log-probs and cache lengths are cut at the same place. The end id
and the tokens of a stop word are kept.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens

from llmctl.runtime.request import FinishReason, Request, Sequence


def first_stop(sequence: Sequence, run: Tokens[int]) -> tuple[int, FinishReason]:
    """(tokens of `run` to keep, reason). The run continues sequence.tokens, not yet extended.

    End ids are tested before stop words and those before the length limit. No earlier than the
    request's min_tokens; a stop word lies wholly in the output, possibly begun in earlier rounds.
    """
    request = sequence.request
    room = sequence.max_len - len(sequence.tokens)
    if len(run) < room and not request.stop_words and not _has_end(request, run):
        return len(run), FinishReason.NOT_FINISHED  # the common case
    end_ids = request.end_ids
    num_new_tokens = sequence.num_new_tokens
    for index, token in enumerate(run):
        num_kept = index + 1
        is_due = num_new_tokens + num_kept >= request.sampling_config.min_tokens
        if token in end_ids and is_due:
            return num_kept, FinishReason.END_ID
        if request.stop_words and is_due and _ends_in_stop_word(sequence, run[:num_kept]):
            return num_kept, FinishReason.STOP_WORDS
        if num_kept >= room:
            return num_kept, FinishReason.LENGTH
    return len(run), FinishReason.NOT_FINISHED


def _has_end(request: Request, run: Tokens[int]) -> bool:
    if request.end_id in run:
        return True
    # Asked of each sequence in each step: a set of these few would take longer than the question.
    for end_id in request.further_end_ids:  # noqa: SIM110  # any() takes a generator, slower here
        if end_id in run:
            return True
    return False


def _ends_in_stop_word(sequence: Sequence, run: Tokens[int]) -> bool:
    words = sequence.request.stop_words
    longest = max(map(len, words))
    # Copies only a short tail: the history may be long.
    start = max(sequence.num_prompt_tokens, len(sequence.tokens) - longest)
    tail = (*sequence.tokens[start:], *run)
    return any(tail[-len(word) :] == word for word in words)


def banned_next(request: Request, tail: Tokens[int], num_new_tokens: int) -> tuple[int, ...]:
    """Ids that must not follow `tail` (at least the last `bad_word_reach` tokens of the history,
    drafts on the path included), when `num_new_tokens` output tokens exist before them.

    An id is banned when it would complete a bad word, which may begin in the prompt, and end ids
    are banned while they would come before min_tokens.
    """
    banned = [
        word[-1]
        for word in request.bad_words
        if len(word) == 1 or tuple(tail[-(len(word) - 1) :]) == word[:-1]
    ]
    if num_new_tokens < request.sampling_config.min_tokens:
        banned += request.end_ids
    return tuple(banned)


def bad_word_reach(request: Request) -> int:
    """How many tokens of history decide whether the next one completes a bad word."""
    return max((len(word) - 1 for word in request.bad_words), default=0)
