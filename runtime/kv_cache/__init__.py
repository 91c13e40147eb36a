"""Paged KV cache bookkeeping: which block holds what, and who may use it. Integers only.

manager.py      leases of sequences: attach, reserve, publish, release
radix_tree.py   full blocks by content, and the order in which unused ones are evicted
"""

from llmctl.runtime.kv_cache.manager import BlockCopy, KvCacheManager, KvCacheStats, PrefixMatch

__all__ = ["BlockCopy", "KvCacheManager", "KvCacheStats", "PrefixMatch"]
