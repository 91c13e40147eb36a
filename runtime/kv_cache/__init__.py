"""Paged KV cache bookkeeping: which block holds what, and who may use it. Integers only.

manager.py      the blocks that a sequence holds: attach, reserve, publish, release
store.py        free, cached and host-memory blocks, and how blocks move between these states
radix_tree.py   full blocks by content
eviction.py     the order in which unused blocks are evicted
events.py       events about cached blocks, for external readers
groups.py       sets of layers, each with its own valid length per sequence
arrivals.py     blocks whose content is still being copied from host memory
prefix.py       the longest cached prefix of a sequence's tokens
moves.py        copies that must happen before the next step
window.py       what a sequence still needs when no layer sees further back
stats.py        counters
audit.py        a recount, for tests
"""

from llmctl.runtime.kv_cache.events import KvCacheEvent, KvCacheEventManager
from llmctl.runtime.kv_cache.manager import KvCacheManager
from llmctl.runtime.kv_cache.moves import Arrival, BlockCopy, BlockHolder, CopyKind, Move
from llmctl.runtime.kv_cache.prefix import PrefixMatch
from llmctl.runtime.kv_cache.stats import KvCacheStats
from llmctl.runtime.kv_cache.window import AttentionWindow, common_window, most_step_tokens

__all__ = [
    "Arrival",
    "AttentionWindow",
    "BlockCopy",
    "BlockHolder",
    "CopyKind",
    "KvCacheEvent",
    "KvCacheEventManager",
    "KvCacheManager",
    "KvCacheStats",
    "Move",
    "PrefixMatch",
    "common_window",
    "most_step_tokens",
]
