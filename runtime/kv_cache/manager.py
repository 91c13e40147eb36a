"""Which sequence holds which KV block: reuse by content, growth, publication, release.

Every block is in exactly one place: on the free list, private to one sequence, or in the radix tree
(used by the sequences on its path, or unused until it is reused or evicted). Only private blocks
are ever written. A block id stands for the same tokens in every cache group, so blocks are
allocated and reused in all groups together. A block may lack the content of a group that lagged
behind; the next sequence that needs it computes it, with the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Row
from time import monotonic

from llmctl.errors import BadConfig
from llmctl.runtime.api.retention import DEFAULT_PRIORITY
from llmctl.runtime.kv_cache.audit import check_leases
from llmctl.runtime.kv_cache.events import KvCacheEventManager
from llmctl.runtime.kv_cache.groups import change_over, groups_with, leading_blocks, publishable
from llmctl.runtime.kv_cache.lease import Lease
from llmctl.runtime.kv_cache.moves import BlockCopy
from llmctl.runtime.kv_cache.prefix import Groups, PrefixMatch, find_prefix, within_reach
from llmctl.runtime.kv_cache.radix_tree import Key, Node, path_to
from llmctl.runtime.kv_cache.stats import KvCacheStats, PromptCounters, make_stats
from llmctl.runtime.kv_cache.store import BlockStore
from llmctl.runtime.kv_cache.window import AttentionWindow
from llmctl.runtime.request import Sequence


class KvCacheManager:
    """Leases KV blocks to sequences. Not thread-safe: the loop's thread owns it.

    A sequence is attached once (`match_and_attach`), grows with `reserve`, publishes what it has
    computed, and returns everything with `release`. Evicted blocks of at least
    `offload_min_priority` move to `num_host_blocks` slots in host memory; with `onboards_aside`
    they are copied back while other sequences run, and `is_arriving` tells which sequences have to
    wait for them.

    `groups` names the sets of KV layers with their own valid length (groups.py).

    With a `window`, a sequence that outgrows it is excluded from reuse and gives back blocks that
    no layer sees any more; `max_step_tokens` is the most tokens of it that a step computes. In its
    table all given-back blocks are replaced by one null block that no sequence owns or reads.

    context_group: as many tokens at a time are computed before `Sequence.context_end`, and reused.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = True,
        groups: Row[str] = ("target",),
        num_host_blocks: int = 0,
        offload_min_priority: int = DEFAULT_PRIORITY,
        events: KvCacheEventManager | None = None,
        window: AttentionWindow | None = None,
        max_step_tokens: int = 0,
        clock: Callable[[], float] = monotonic,
        onboards_aside: bool = False,
        context_group: int = 0,
    ) -> None:
        if num_blocks < 1 or tokens_per_block < 1:
            raise BadConfig(
                f"a KV cache of {num_blocks} blocks of {tokens_per_block} tokens holds nothing; "
                "num_blocks and tokens_per_block must be at least 1"
            )
        assert context_group % tokens_per_block == 0, "a group of whole blocks"
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.context_group = context_group
        self.num_host_blocks = num_host_blocks
        self.enable_block_reuse = enable_block_reuse
        self.enable_partial_reuse = enable_block_reuse and enable_partial_reuse
        self.groups = tuple(groups)
        self.version = 0  # changes whenever a request that did not fit might fit now
        self.events = KvCacheEventManager(0) if events is None else events
        self._store = BlockStore(
            num_blocks,
            tokens_per_block,
            num_host_blocks,
            offload_min_priority,
            self.events,
            clock,
            onboards_aside,
        )
        self.arrivals = self._store.arrivals
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
        """Blocks that can be allocated now: free ones, and cached ones without users."""
        return self._store.num_available

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens occupy, the last one perhaps partially."""
        return -(-num_tokens // self.tokens_per_block)

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that sequences may hold at most, all together."""
        return self.num_blocks - (self._null_block is not None)

    def outgrows_window(self, sequence: Sequence) -> bool:
        """True for a sequence whose oldest tokens will eventually be outside every layer's
        window."""
        return self.window is not None and sequence.max_len > self.window.size

    def num_blocks_to_hold(self, sequence: Sequence, num_tokens: int) -> int:
        """The most blocks that a sequence holds until it has num_tokens tokens."""
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
        size, with_partial = self.tokens_per_block, self.enable_partial_reuse
        groups = Groups(sequence.context_end, self.context_group)
        return find_prefix(tree, sequence.tokens, size, groups, with_partial=with_partial)

    def attach(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Start a lease from a new `lookup`; returns the number of tokens reused.

        Sets the sequence's block_table and kv_lens. A partial match becomes a private copy, and
        blocks in host memory are copied back: see `pending_copies`.
        """
        assert sequence.sequence_id not in self._leases and not sequence.block_table
        store = self._store
        groups = Groups(sequence.context_end, self.context_group)
        full = groups.last(within_reach(store, match.full), self.tokens_per_block)
        path = path_to(full)
        num_computed = leading_blocks(path, len(self.groups))
        lease = self._leases[sequence.sequence_id] = Lease(sequence, full, num_computed)
        partial = match.partial if full is match.full else None
        if partial is not None:
            store.touch(partial)
        store.use_path(full)
        for node in path:
            self._retain(lease, node)
        table = sequence.block_table
        table.extend(node.block_id for node in path)
        num_tokens = full.depth * self.tokens_per_block
        lens = [count * self.tokens_per_block for count in num_computed]
        num_copied = 0
        if partial is not None and partial.is_cached and store.num_available:
            num_copied = match.num_partial_tokens
            table.append(store.copy_of(partial, num_copied))
            for group, length in enumerate(lens):
                if length == num_tokens and partial.groups >> group & 1:
                    lens[group] += num_copied
            num_tokens += num_copied
        num_missed = self.num_blocks_for(len(sequence.tokens) - 1) - len(table)
        self._prompts.count(sequence, full.depth, num_copied, num_missed, num_tokens)
        lease.arrival = self.arrivals.latest(table)
        sequence.kv_lens = lens
        return num_tokens

    def is_arriving(self, sequence: Sequence) -> bool:
        """True while blocks of an attached sequence are being copied from host memory."""
        return not self.arrivals.has_arrived(self._leases[sequence.sequence_id].arrival)

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
        """Make the full blocks of committed tokens available for reuse; a sequence that outgrows
        the window gives back what no layer sees.

        If another sequence has published the same content first, this one switches to that block
        and frees its own: the contents are equal, so one copy is enough.
        """
        size = self.tokens_per_block
        lease = self._leases[sequence.sequence_id]
        if self.window is not None and self.outgrows_window(sequence):
            self._drop_unseen(lease, self.window)
            return
        if not self.enable_block_reuse:
            return
        lens, first = sequence.kv_lens, (lease.tail.depth + 1) * size
        # For most steps, group 0 alone shows that they completed no block.
        if lens[0] >= first and (valid := publishable(lens, len(sequence.tokens))) >= first:
            assert valid < len(sequence.tokens), "a cache entry of a token that is not committed"
            for index in range(lease.tail.depth, valid // size):
                self._publish_block(lease, index)
            self.version += 1
        if len(lens) > 1:
            lease.mark_computed(size)

    def _publish_block(self, lease: Lease, index: int) -> None:
        """Publish one more block of a sequence."""
        sequence, size = lease.sequence, self.tokens_per_block
        table, start = sequence.block_table, index * size
        tokens = tuple(sequence.tokens[start : start + size])
        key = Key(tokens, start < sequence.context_end)
        computed = groups_with(sequence.kv_lens, start + size)
        node = self._store.publish(lease.tail, key, table[index], computed)
        if node.block_id != table[index]:
            change_over(sequence.kv_lens, computed, node, start, start + size)
            table[index] = node.block_id
        self._retain(lease, node)
        lease.tail = node

    def release(self, sequence: Sequence) -> None:
        """End the lease: published blocks stay cached as long as there is room, the others are
        freed.

        The sequence's block_table and kv_lens are reset.
        """
        lease = self._leases.pop(sequence.sequence_id)
        own = sequence.block_table[lease.tail.depth :]
        self._store.give_back(block for block in reversed(own) if block != self._null_block)
        self._store.leave_path(lease.tail)
        sequence.block_table.clear()
        sequence.kv_lens = [0] * len(self.groups)
        self.version += 1

    def pending_copies(self) -> list[BlockCopy]:
        """The copies to perform before the next step, in this order, in every group; each is
        returned once.

        The order matters: a source block may since have been given to another sequence, which
        writes it in the step or as the target of a later copy.
        """
        copies, self._store.copies = self._store.copies, []
        return copies

    def abandon_copies(self) -> None:
        """Called after a step that raised, when no block is in use: copies may be missing.

        Most copies within the device were for sequences that have ended. Contents that were to move
        between device and host, or to a block that lacks a group, are lost, so everything cached is
        discarded.
        """
        assert not self._leases
        if self.num_host_blocks or len(self.groups) > 1:
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
        size, num_groups = self.tokens_per_block, len(self.groups)
        check_leases(self._leases.values(), self._store, size, self._null_block, num_groups)

    def _drop_unseen(self, lease: Lease, window: AttentionWindow) -> None:
        """Give back the blocks that are outside the window of every future query."""
        assert self._null_block is not None
        unseen = lease.drop_unseen(window, self.tokens_per_block, self._null_block)
        if unseen:
            self._store.give_back(reversed(unseen))
            self.version += 1

    def _retain(self, lease: Lease, node: Node) -> None:
        """Tell the store the retention that the sequence's request sets for this block, if any."""
        retention = lease.retention(node, self.tokens_per_block)
        if retention is not None:
            self._store.retain(node, retention)
