"""Who holds which KV block: reuse by content, growth, publication, release, eviction.

Every block is in exactly one place: on the free list, private to one sequence, or in the radix
tree (in use by the sequences on its path, or unused and waiting to be hit or evicted). Only
private blocks are ever written. One block id stands for the same tokens in the target's cache
and, where there is a draft engine, in the draft's: blocks are allocated and reused in pairs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from llmctl.errors import BadConfig
from llmctl.runtime.core import Sequence
from llmctl.runtime.kv_cache.radix_tree import Node, RadixTree


@dataclass(frozen=True, slots=True)
class KvCacheStats:
    """Counts in blocks. `used` are held by sequences; `free` includes cached blocks nobody uses.

    reused + missed is the number of blocks that prompts would have filled without reuse; the
    alloc counters cover the life of the cache, reused full blocks included in the total.
    """

    max_num_blocks: int
    free_num_blocks: int
    used_num_blocks: int
    tokens_per_block: int
    alloc_total_blocks: int
    alloc_new_blocks: int
    reused_blocks: int
    missed_blocks: int

    @property
    def cache_hit_rate(self) -> float:
        """Reused share of all prompt blocks so far; 0 before the first prompt."""
        asked = self.reused_blocks + self.missed_blocks
        return self.reused_blocks / asked if asked else 0.0


class BlockCopy(NamedTuple):
    """Copy block `src_block` to `dst_block`, all layers, before the step. num_tokens matter."""

    src_block: int
    dst_block: int
    num_tokens: int


class PrefixMatch(NamedTuple):
    """What the tree knows of a sequence's tokens: `full` ends the path of shared full blocks."""

    full: Node
    partial: Node | None  # a child of `full` that agrees on its first num_partial_tokens
    num_partial_tokens: int
    num_blocks_in_use: int  # full blocks that other sequences hold now: they cost no free block


class _Lease:
    """A sequence that holds blocks: its first tail.depth blocks are in the tree."""

    __slots__ = ("sequence", "tail")

    def __init__(self, sequence: Sequence, tail: Node) -> None:
        self.sequence = sequence
        self.tail = tail


class KvCacheManager:
    """Leases KV blocks to sequences. Not thread-safe: the loop's thread owns it.

    A sequence is attached once (`match_and_attach`), grows with `reserve`, publishes what it has
    computed, and gives everything back with `release`.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        enable_block_reuse: bool = True,
        enable_partial_reuse: bool = True,
        has_draft: bool = False,
    ) -> None:
        if num_blocks < 1 or tokens_per_block < 1:
            raise BadConfig(
                f"a KV cache of {num_blocks} blocks of {tokens_per_block} tokens holds nothing; "
                "num_blocks and tokens_per_block must be at least 1"
            )
        self.num_blocks = num_blocks
        self.tokens_per_block = tokens_per_block
        self.enable_block_reuse = enable_block_reuse
        self.enable_partial_reuse = enable_block_reuse and enable_partial_reuse
        self.has_draft = has_draft
        self.version = 0  # changes whenever a request that did not fit may fit now
        self._tree = RadixTree(tokens_per_block)
        self._free = list(range(num_blocks - 1, -1, -1))
        self._leases: dict[int, _Lease] = {}
        self._copies: list[BlockCopy] = []
        self._alloc_new_blocks = 0
        self._reused_full_blocks = 0
        self._reused_partial_blocks = 0
        self._missed_blocks = 0

    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be handed out now: free ones and cached ones nobody uses."""
        return len(self._free) + len(self._tree.unused)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that num_tokens tokens fill, the last one perhaps in part."""
        return -(-num_tokens // self.tokens_per_block)

    def lookup(self, sequence: Sequence) -> PrefixMatch:
        """What `attach` would reuse. Changes nothing. The last token is never reused."""
        root = self._tree.root
        if not self.enable_block_reuse:
            return PrefixMatch(root, None, 0, 0)
        limit = len(sequence.tokens) - 1
        full = self._tree.longest_match(sequence.tokens, limit)
        partial, num_partial_tokens = None, 0
        if self.enable_partial_reuse:
            start = full.depth * self.tokens_per_block
            rest = sequence.tokens[start : min(start + self.tokens_per_block, limit)]
            partial, num_partial_tokens = self._tree.partial_match(full, rest)
        node = full  # users only grow towards the root
        while node.parent is not None and node.num_users == 0:
            node = node.parent
        return PrefixMatch(full, partial, num_partial_tokens, node.depth)

    def attach(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Start a lease from a fresh `lookup`; returns the number of tokens reused.

        Sets the sequence's block_table, kv_len and draft_kv_len. A partial match becomes a
        private copy: see `pending_copies`.
        """
        assert sequence.sequence_id not in self._leases and not sequence.block_table
        size = self.tokens_per_block
        full = match.full
        self._leases[sequence.sequence_id] = _Lease(sequence, full)
        self._tree.use_path(full)
        table = sequence.block_table
        node = full
        while node.parent is not None:
            table.append(node.block_id)
            node = node.parent
        table.reverse()
        num_tokens = full.depth * size
        num_copied = 0
        if match.partial is not None:
            self._tree.touch(match.partial)
            if self.num_available_blocks:
                num_copied = match.num_partial_tokens
                table.append(self._copy_of(match.partial, num_copied))
        self._reused_full_blocks += full.depth
        self._reused_partial_blocks += num_copied > 0
        self._missed_blocks += self.num_blocks_for(len(sequence.tokens) - 1) - len(table)
        num_tokens += num_copied
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
        if missing > self.num_available_blocks:
            return False
        table.extend(self._take_block() for _ in range(missing))
        return True

    def max_reservable_tokens(self, sequence: Sequence) -> int:
        """The largest num_tokens for which `reserve` would succeed now."""
        return (len(sequence.block_table) + self.num_available_blocks) * self.tokens_per_block

    def publish(self, sequence: Sequence) -> None:
        """Make the full blocks of committed tokens, valid in every cache, findable by others.

        Where another sequence has published the same content first, this one changes over to
        that block and frees its own: the contents are equal, so one copy is enough.
        """
        size = self.tokens_per_block
        valid = sequence.kv_len
        if self.has_draft and sequence.draft_kv_len < valid:
            valid = sequence.draft_kv_len
        lease = self._leases[sequence.sequence_id]
        node = lease.tail
        if valid < (node.depth + 1) * size or not self.enable_block_reuse:
            return
        assert valid < len(sequence.tokens), "a cache entry of a token that is not committed"
        table = sequence.block_table
        for index in range(node.depth, valid // size):
            key = tuple(sequence.tokens[index * size : (index + 1) * size])
            known = node.children.get(key)
            if known is None:
                node = self._tree.add(node, key, table[index])
            else:
                self._free.append(table[index])
                table[index] = known.block_id
                self._tree.use(known)
                node = known
        lease.tail = node
        self.version += 1

    def release(self, sequence: Sequence) -> None:
        """End the lease: published blocks stay cached while there is room, the rest is free.

        The sequence's block_table, kv_len and draft_kv_len are reset.
        """
        lease = self._leases.pop(sequence.sequence_id)
        self._free.extend(reversed(sequence.block_table[lease.tail.depth :]))
        self._tree.leave_path(lease.tail)
        sequence.block_table.clear()
        sequence.kv_len = 0
        sequence.draft_kv_len = 0
        self.version += 1

    def pending_copies(self) -> list[BlockCopy]:
        """Hand over the copies to perform before the next step, in this order, in every cache.

        Each is handed over once. The order matters: a source may have been given to somebody
        else since, who writes it in the step or as the target of a later copy.
        """
        copies, self._copies = self._copies, []
        return copies

    def stats(self) -> KvCacheStats:
        """The counters now; reading them changes nothing."""
        num_available = self.num_available_blocks
        return KvCacheStats(
            max_num_blocks=self.num_blocks,
            free_num_blocks=num_available,
            used_num_blocks=self.num_blocks - num_available,
            tokens_per_block=self.tokens_per_block,
            alloc_total_blocks=self._alloc_new_blocks + self._reused_full_blocks,
            alloc_new_blocks=self._alloc_new_blocks,
            reused_blocks=self._reused_full_blocks + self._reused_partial_blocks,
            missed_blocks=self._missed_blocks,
        )

    def check_invariants(self) -> None:
        """Recount everything from scratch; AssertionError on the first contradiction.

        For tests: walks all blocks and all leases.
        """
        size = self.tokens_per_block
        nodes = self._tree.nodes()
        users = dict.fromkeys(nodes, 0)
        private: list[int] = []
        for lease in self._leases.values():
            sequence, node = lease.sequence, lease.tail
            private += sequence.block_table[node.depth :]
            assert sequence.kv_len <= len(sequence.block_table) * size
            assert sequence.draft_kv_len <= len(sequence.block_table) * size
            while node.parent is not None:
                index = node.depth - 1
                assert sequence.block_table[index] == node.block_id
                assert tuple(sequence.tokens[index * size : (index + 1) * size]) == node.key
                users[node] += 1
                node = node.parent
        for node, count in users.items():
            assert node.num_users == count, f"block {node.block_id} has a wrong user count"
            assert (node in self._tree.unused) == (count == 0)
        assert len(self._tree.unused) == sum(count == 0 for count in users.values())
        blocks = sorted(self._free + private + [node.block_id for node in nodes])
        assert blocks == list(range(self.num_blocks)), "a block leaked or has two owners"

    def _take_block(self) -> int:
        self._alloc_new_blocks += 1
        return self._free.pop() if self._free else self._tree.evict()

    def _copy_of(self, node: Node, num_tokens: int) -> int:
        block_id = self._take_block()
        if block_id != node.block_id:  # else it was the last one left, and is simply taken over
            self._copies.append(BlockCopy(node.block_id, block_id, num_tokens))
        return block_id
