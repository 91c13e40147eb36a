"""Who holds which KV block: reuse by content, growth, publication, release.

Every block is in exactly one place: on the free list, private to one sequence, or in the radix
tree (in use by the sequences on its path, or unused and waiting to be hit or evicted). Only
private blocks are ever written. One block id stands for the same tokens in the target's cache
and, where there is a draft engine, in the draft's: blocks are allocated and reused in pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import NamedTuple

from llmctl.errors import BadConfig
from llmctl.runtime.core import Sequence
from llmctl.runtime.kv_cache.audit import check_leases
from llmctl.runtime.kv_cache.events import KvCacheEventManager
from llmctl.runtime.kv_cache.lease import Lease
from llmctl.runtime.kv_cache.moves import BlockCopy
from llmctl.runtime.kv_cache.radix_tree import Node, path_to
from llmctl.runtime.kv_cache.stats import KvCacheStats, PromptCounters, make_stats
from llmctl.runtime.kv_cache.store import BlockStore
from llmctl.runtime.kv_cache.window import AttentionWindow
from llmctl.runtime.retention import DEFAULT_PRIORITY


class PrefixMatch(NamedTuple):
    """What the tree knows of a sequence's tokens: `full` ends the path of shared full blocks."""

    full: Node
    partial: Node | None  # a child of `full` that agrees on its first num_partial_tokens
    num_partial_tokens: int
    num_blocks_in_use: int  # full blocks that other sequences hold now: they cost no free block


class KvCacheManager:
    """Leases KV blocks to sequences. Not thread-safe: the loop's thread owns it.

    A sequence is attached once (`match_and_attach`), grows with `reserve`, publishes what it has
    computed, and gives everything back with `release`. Evicted blocks of at least
    `offload_min_priority` move to `num_host_blocks` places in host memory.

    With a `window` a sequence that outgrows it takes no part in reuse and gives back what no layer
    sees any more; `max_step_tokens` is the most that a step computes of it. What it gave back is
    one and the same block in its table, which nobody owns and nobody reads.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = True,
        has_draft: bool = False,
        num_host_blocks: int = 0,
        offload_min_priority: int = DEFAULT_PRIORITY,
        events: KvCacheEventManager | None = None,
        window: AttentionWindow | None = None,
        max_step_tokens: int = 0,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        if num_blocks < 1 or tokens_per_block < 1:
            raise BadConfig(
                f"a KV cache of {num_blocks} blocks of {tokens_per_block} tokens holds nothing; "
                "num_blocks and tokens_per_block must be at least 1"
            )
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.num_host_blocks = num_host_blocks
        self.enable_block_reuse = enable_block_reuse
        self.enable_partial_reuse = enable_block_reuse and enable_partial_reuse
        self.has_draft = has_draft
        self.version = 0  # changes whenever a request that did not fit may fit now
        self.events = KvCacheEventManager(0) if events is None else events
        self._store = BlockStore(
            num_blocks, tokens_per_block, num_host_blocks, offload_min_priority, self.events, clock
        )
        self.window = window
        self._ring_blocks = num_blocks
        self._null_block: int | None = None
        if window is not None:
            self._ring_blocks = window.most_blocks(max_step_tokens, tokens_per_block)
            self._null_block = self._store.take_block()
        self._leases: dict[int, Lease] = {}
        self._prompts = PromptCounters()

    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be handed out now: free ones and cached ones nobody uses."""
        return self._store.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.tokens_per_block)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences may hold at most, all together."""
        return self.num_blocks - (self._null_block is not None)

    def outgrows_window(self, sequence: Sequence) -> bool:
        """True for a sequence whose oldest tokens no layer will see in the end."""
        return self.window is not None and sequence.max_len > self.window.size

    def num_blocks_to_hold(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that a sequence holds at most on its way to num_tokens tokens."""
        wanted = self.num_blocks_for(num_tokens)
        return min(wanted, self._ring_blocks) if self.outgrows_window(sequence) else wanted

    def num_held_blocks(self, sequence: Sequence) -> int:
        """Blocks that an attached sequence holds now."""
        return len(sequence.block_table) - self._leases[sequence.sequence_id].num_dropped

    def lookup(self, sequence: Sequence) -> PrefixMatch:
        """What `attach` would reuse. Changes nothing. The last token is never reused."""
        tree = self._store.tree
        if not self.enable_block_reuse or self.outgrows_window(sequence):
            return PrefixMatch(tree.root, None, 0, 0)
        limit = len(sequence.tokens) - 1
        full = tree.longest_match(sequence.tokens, limit)
        partial, num_partial_tokens = None, 0
        if self.enable_partial_reuse:
            start = full.depth * self.tokens_per_block
            rest = sequence.tokens[start : min(start + self.tokens_per_block, limit)]
            partial, num_partial_tokens = tree.partial_match(full, rest)
        node = full  # users only grow towards the root
        while node.parent is not None and node.num_users == 0:
            node = node.parent
        return PrefixMatch(full, partial, num_partial_tokens, node.depth)

    def attach(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Start a lease from a fresh `lookup`; returns the number of tokens reused.

        Sets the sequence's block_table, kv_len and draft_kv_len. A partial match becomes a
        private copy, and what lies in host memory comes back: see `pending_copies`.
        """
        assert sequence.sequence_id not in self._leases and not sequence.block_table
        store = self._store
        full = self._within_reach(match.full)
        self._leases[sequence.sequence_id] = Lease(sequence, full)
        partial = match.partial if full is match.full else None
        if partial is not None:
            store.touch(partial)
        store.use_path(full)
        path = path_to(full)
        for node in path:
            self._retain(sequence, node)
        table = sequence.block_table
        table.extend(node.block_id for node in path)
        num_copied = 0
        if partial is not None and partial.is_cached and store.num_available:
            num_copied = match.num_partial_tokens
            table.append(store.copy_of(partial, num_copied))
        num_tokens = full.depth * self.tokens_per_block + num_copied
        num_missed = self.num_blocks_for(len(sequence.tokens) - 1) - len(table)
        counts = sequence.blocks
        counts.num_new += num_copied > 0
        counts.num_shared += full.depth
        counts.num_reused += len(table)
        counts.num_missed += num_missed
        counts.num_reused_tokens += num_tokens
        self._prompts.count(
            full_blocks=full.depth,
            has_partial=num_copied > 0,
            missed_blocks=num_missed,
            reused_tokens=num_tokens,
            tokens=len(sequence.tokens) - 1,
        )
        sequence.kv_len = num_tokens
        sequence.draft_kv_len = num_tokens if self.has_draft else 0
        return num_tokens

    def match_and_attach(self, sequence: Sequence) -> int:
        """`attach` whatever `lookup` finds; returns the number of tokens reused."""
        return self.attach(sequence, self.lookup(sequence))

    def reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        """Grow the block table to cover num_tokens; False, with nothing changed, when short."""
        table = sequence.block_table
        if num_tokens <= len(table) * self.tokens_per_block:
            return True
        assert sequence.sequence_id in self._leases, "reserve before attach"
        missing = self.num_blocks_for(num_tokens) - len(table)
        if missing > self._store.num_available:
            return False
        table.extend(self._store.take_block() for _ in range(missing))
        sequence.blocks.num_new += missing
        return True

    def max_reservable_tokens(self, sequence: Sequence) -> int:
        """The largest num_tokens for which `reserve` would succeed now."""
        return (len(sequence.block_table) + self._store.num_available) * self.tokens_per_block

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks of committed tokens, valid in every cache, findable by others; of a
        sequence that outgrows the window, give back what nobody sees.

        Where another sequence has published the same content first, this one changes over to
        that block and frees its own: the contents are equal, so one copy is enough.
        """
        size = self.tokens_per_block
        valid = sequence.kv_len
        if self.has_draft and sequence.draft_kv_len < valid:
            valid = sequence.draft_kv_len
        lease = self._leases[sequence.sequence_id]
        if self.window is not None and self.outgrows_window(sequence):
            self._drop_unseen(lease, self.window)
            return
        node = lease.tail
        if valid < (node.depth + 1) * size or not self.enable_block_reuse:
            return
        assert valid < len(sequence.tokens), "a cache entry of a token that is not committed"
        table = sequence.block_table
        for index in range(node.depth, valid // size):
            key = tuple(sequence.tokens[index * size : (index + 1) * size])
            node = self._store.publish(node, key, table[index])
            table[index] = node.block_id
            self._retain(sequence, node)
        lease.tail = node
        self.version += 1

    def release(self, sequence: Sequence) -> None:
        """End the lease: published blocks stay cached while there is room, the rest is free.

        The sequence's block_table, kv_len and draft_kv_len are reset.
        """
        lease = self._leases.pop(sequence.sequence_id)
        own = sequence.block_table[lease.tail.depth :]
        self._store.give_back(block for block in reversed(own) if block != self._null_block)
        self._store.leave_path(lease.tail)
        sequence.block_table.clear()
        sequence.kv_len = 0
        sequence.draft_kv_len = 0
        self.version += 1

    def pending_copies(self) -> list[BlockCopy]:
        """Hand over the copies to perform before the next step, in this order, in every cache.

        Each is handed over once. The order matters: a source may have been given to somebody
        else since, who writes it in the step or as the target of a later copy.
        """
        copies, self._store.copies = self._store.copies, []
        return copies

    def abandon_copies(self) -> None:
        """After a step that raised, once nobody holds a block: copies may be missing.

        Those within the device were for sequences that have ended. Contents that were to move
        between device and host are lost, and with them all that is cached.
        """
        assert not self._leases
        if self.num_host_blocks:
            self._store.forget()
        self._store.copies.clear()
        self.version += 1

    def stats(self) -> KvCacheStats:
        """The counters now; reading them changes nothing."""
        num_null = self.num_blocks - self.num_usable_blocks
        return make_stats(self._store, self._prompts, self.tokens_per_block, num_null)

    def check_invariants(self) -> None:
        """Recount everything from scratch; AssertionError on the first contradiction.

        For tests: walks all blocks and all leases.
        """
        check_leases(self._leases.values(), self._store, self.tokens_per_block, self._null_block)

    def _drop_unseen(self, lease: Lease, window: AttentionWindow) -> None:
        """Give back the blocks that lie before the window of every query to come."""
        sequence, size = lease.sequence, self.tokens_per_block
        position = sequence.kv_len
        if self.has_draft:  # a draft that lags behind looks back from where it is
            position = max(min(position, sequence.draft_kv_len), position - window.draft_lag)
        first = -(-window.sink_end // size) + lease.num_dropped
        num_unseen = window.oldest(position) // size - first
        if num_unseen > 0:
            assert self._null_block is not None
            table = sequence.block_table
            self._store.give_back(reversed(table[first : first + num_unseen]))
            table[first : first + num_unseen] = [self._null_block] * num_unseen
            lease.num_dropped += num_unseen
            self.version += 1

    def _within_reach(self, full: Node) -> Node:
        """The deepest node on the path whose blocks in host memory find room on the device."""
        path = path_to(full)
        num_unused = sum(node.is_on_device and node.num_users == 0 for node in path)
        num_in_host = sum(not node.is_on_device for node in path)
        excess = num_in_host - (self._store.num_available - num_unused)
        while excess > 0 and num_in_host > 0 and full.parent is not None:
            full = full.parent
            excess -= 1
            num_in_host -= 1
        return full

    def _retain(self, sequence: Sequence, node: Node) -> None:
        """Tell the store what the sequence's request says of this block, if anything."""
        config = sequence.request.kv_cache_retention_config
        if config is not None:
            first_token = (node.depth - 1) * self.tokens_per_block
            retention = config.of_block(first_token, sequence.num_prompt_tokens)
            if retention is not None:
                self._store.retain(node, retention)
