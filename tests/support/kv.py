"""Sequences that come, compute and go, for tests of the KV cache's bookkeeping."""

from __future__ import annotations

from llmctl.plugins.ops.paged_attention.fp8_context import context_end
from llmctl.runtime.api.retention import KvCacheRetentionConfig, TokenRangeRetentionConfig
from llmctl.runtime.request import Request, Sequence

BLOCK = 4
PAIR = ("target", "draft")


class Clock:
    """A time that tests set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def make_sequence(sequence_id, tokens, retention=None, max_tokens=8, group=0):
    return Sequence(
        sequence_id=sequence_id,
        request_id=sequence_id,
        request=Request(tuple(tokens), max_tokens=max_tokens, kv_cache_retention_config=retention),
        index=0,
        tokens=list(tokens),
        num_prompt_tokens=len(tokens),
        max_len=len(tokens) + max_tokens,
        context_end=context_end(len(tokens), group),
    )


def start(cache, sequence_id, tokens, retention=None):
    """Attach, compute all tokens and commit one more, publish: a sequence after its prompt."""
    sequence = make_sequence(sequence_id, tokens, retention, group=cache.context_group)
    cache.match_and_attach(sequence)
    assert cache.reserve(sequence, len(tokens))
    advance(cache, sequence, 1000)
    return sequence


def advance(cache, sequence, token):
    sequence.kv_lens = [len(sequence.tokens)] * len(cache.groups)
    sequence.tokens.append(token)
    cache.publish(sequence)
    cache.check_invariants()


def run_and_release(cache, sequence_id, tokens, retention=None):
    """Leave the full blocks of `tokens` in the cache; returns the block table it had."""
    sequence = start(cache, sequence_id, tokens, retention)
    table = list(sequence.block_table)
    cache.release(sequence)
    cache.check_invariants()
    return table


def attached(cache, sequence_id, tokens):
    sequence = make_sequence(sequence_id, tokens, group=cache.context_group)
    cache.match_and_attach(sequence)
    return sequence


def num_cached(cache, tokens):
    """Full blocks of `tokens` that the cache knows, on the device and in host memory."""
    node = cache.lookup(make_sequence(-1, [*tokens, -1])).full
    on_device = 0
    depth = node.depth
    while node.parent is not None:
        on_device += node.is_on_device
        node = node.parent
    return on_device, depth - on_device


def keep(priority, duration_ms=None, start=0, end=None):
    """A retention of one range of the prompt."""
    return KvCacheRetentionConfig((TokenRangeRetentionConfig(start, end, priority, duration_ms),))


def fill(cache, sequence_id, num_blocks):
    """Take so many blocks for a sequence of its own and give them back, nothing cached."""
    sequence = attached(cache, sequence_id, [90 + sequence_id])
    assert cache.reserve(sequence, num_blocks * BLOCK)
    cache.check_invariants()
    cache.release(sequence)
