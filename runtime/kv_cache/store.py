"""Where blocks are: free, in the tree on the device, or in the tree in host memory.

A block is taken from the free list, else from the least valuable unused leaf of the tree. With a
host tier the content of such a leaf moves to host memory, where it is in turn replaced by more
valuable content, and moves back to the device when it is reused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from time import monotonic

from llmctl.runtime.api.retention import DEFAULT_PRIORITY, Retention
from llmctl.runtime.kv_cache import events
from llmctl.runtime.kv_cache.arrivals import Arrivals
from llmctl.runtime.kv_cache.eviction import (
    LazyHeap,
    is_device_victim,
    is_expiring,
    is_host_victim,
    worth,
)
from llmctl.runtime.kv_cache.moves import BlockCopy, CopyKind
from llmctl.runtime.kv_cache.radix_tree import NOWHERE, Key, Node, RadixTree, path_to


class BlockStore:
    """Blocks and the tree of their contents; of sequences it knows only how many use each node."""

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        num_host_blocks: int,
        offload_min_priority: int,
        event_manager: events.KvCacheEventManager,
        clock: Callable[[], float] = monotonic,
        onboards_aside: bool = False,
    ) -> None:
        self.arrivals = Arrivals(onboards_aside)
        self.tree = RadixTree(tokens_per_block)
        self.num_host_blocks = num_host_blocks
        self.copies: list[BlockCopy] = []  # to perform, in this order
        self.num_taken = self.num_evicted = self.num_offloaded = self.num_onboarded = 0
        self.num_unused = 0  # blocks of the tree on the device without users
        self.num_blocks = num_blocks
        self._tokens_per_block = tokens_per_block
        self._offload_min_priority = offload_min_priority
        self._events = event_manager
        self._clock = clock
        self.free = list(range(num_blocks - 1, -1, -1))
        # The oldest first: a block freed just now may still be read by a copy in flight.
        self.free_slots = deque(range(num_host_blocks))
        self.victims = LazyHeap(is_device_victim, num_blocks)
        self.host_victims = LazyHeap(is_host_victim, num_host_blocks)
        self._expiring = LazyHeap(is_expiring, num_blocks + num_host_blocks)
        self._tick = 0
        levels = (num_blocks, num_host_blocks) if num_host_blocks else (num_blocks,)
        self._events.add(events.KvCacheCreatedData(levels))

    @property
    def num_available(self) -> int:
        """Blocks that could be taken now: free ones and cached ones nobody uses."""
        return len(self.free) + self.num_unused

    @property
    def num_host_used(self) -> int:
        """Blocks in host memory."""
        return self.num_host_blocks - len(self.free_slots)

    def take_block(self) -> int:
        """A block of the device to write; needs num_available > 0."""
        self.num_taken += 1
        block_id = self.free.pop() if self.free else self._evict()
        self.arrivals.need(block_id)
        return block_id

    def give_back(self, block_ids: Iterable[int]) -> None:
        """Blocks that nobody holds any more, the first to be taken again last."""
        self.free.extend(block_ids)

    def copy_of(self, node: Node, num_tokens: int) -> int:
        """A private block with the first tokens of `node`; needs num_available > 0."""
        if node.is_on_device:
            source = node.block_id
            block_id = self.take_block()
            if block_id != source:  # else it was the last available block, and is used directly
                self.copies.append(BlockCopy(source, block_id, num_tokens))
            return block_id
        node.num_users += 1  # must not be evicted while a block is being found
        block_id = self.take_block()
        node.num_users -= 1
        self.touch(node)
        self._bring(node.host_slot, block_id, num_tokens)
        return block_id

    # ---- users ----

    def use(self, node: Node) -> None:
        """Count one more user of `node` alone; the caller uses the nodes above it already."""
        if node.num_users == 0:
            node.expires_at = None
            self.num_unused -= node.is_on_device
        node.num_users += 1

    def use_path(self, node: Node) -> None:
        """Count one more user of `node` and of everything above it, and bring all of it to the
        device.

        Needs as many available blocks as there are nodes in host memory on the path.
        """
        path = path_to(node)
        for item in path:
            self.use(item)
        for item in path:
            if not item.is_on_device:
                self._onboard(item)

    def leave_path(self, node: Node) -> None:
        """Take one user from `node` and from everything above it, deepest first."""
        while node.parent is not None:
            node.num_users -= 1
            if node.num_users == 0:
                self.num_unused += 1
                if node.duration_s is not None:
                    node.expires_at = self._clock() + node.duration_s
                    self._expiring.push((node.expires_at, 0), node)
                self.touch(node)
            node = node.parent

    def touch(self, node: Node) -> None:
        """Make an unused node the most recently used of its priority; no effect on a used one."""
        self._tick += 1
        node.last_used = self._tick
        self._enlist(node)

    def publish(self, parent: Node, key: Key, block_id: int, groups: int = 1) -> Node:
        """Make a block of a sequence that uses `parent` findable, with the content of these groups;
        its publisher uses the result.

        Where the content is known already, the block found first stays (see `Node.block_id`) and
        `block_id` is free again, after the groups that only it has were copied; what lay in host
        memory only is replaced by `block_id`.
        """
        node = parent.children.get(key)
        if node is None:
            node = self.tree.add(parent, key, block_id)
            node.groups = groups
            node.num_users = 1
            self._announce(node)
            return node
        self.use(node)
        if node.is_on_device:
            self.arrivals.need(node.block_id)
            if missing := groups & ~node.groups:
                copy = BlockCopy(block_id, node.block_id, self._tokens_per_block, groups=missing)
                self.copies.append(copy)
                node.groups |= missing
            self.free.append(block_id)
        else:
            self.free_slots.append(node.host_slot)
            self._settle(node, block_id)
            node.groups = groups
        return node

    def retain(self, node: Node, retention: Retention) -> None:
        """Set priority and duration of a node in use."""
        assert node.num_users, "only what is used is given another priority"
        self._set_priority(node, retention.priority)
        milliseconds = retention.duration_ms
        node.duration_s = None if milliseconds is None else milliseconds / 1e3

    def forget(self) -> None:
        """Drop all cached contents and every copy not yet performed. No node may have users."""
        for node in list(self.tree.root.children.values()):
            self._drop(node)
        self.copies.clear()
        self.arrivals.await_all()

    # ---- leaving the device, and coming back ----

    def _evict(self) -> int:
        """Evict the least valuable leaf on the device: to host memory, or completely."""
        self._expire()
        found = self.victims.peek()
        assert found is not None, "a block is taken where none is available"
        node = found[1]
        block_id, parent = node.block_id, node.parent
        assert parent is not None
        slot = self._slot_for(node)
        self.num_evicted += 1
        if slot is None:
            self._drop(node)
            freed = self.free.pop()
            assert freed == block_id, "a leaf of the device has nothing on the device below it"
        else:
            self.copies.append(BlockCopy(block_id, slot, self._tokens_per_block, CopyKind.OFFLOAD))
            self.num_offloaded += 1
            self.num_unused -= 1
            node.block_id, node.host_slot = NOWHERE, slot
            parent.num_device_children -= 1
            self._enlist(node)
            self._announce_level(node, events.DEVICE_LEVEL, events.HOST_LEVEL)
        self._enlist(parent)
        return block_id

    def _slot_for(self, node: Node) -> int | None:
        """A slot in host memory for a leaf of the device; None if it is not valuable enough. A leaf
        that is continued by blocks in host memory is as valuable as they are."""
        is_needed = bool(node.children)
        if node.priority < self._offload_min_priority and not is_needed:
            return None
        if not self.free_slots:
            found = self.host_victims.peek()
            if found is None or (found[1].priority > node.priority and not is_needed):
                return None
            parent = found[1].parent
            self._drop(found[1])
            assert parent is not None
            self._enlist(parent)
        return self.free_slots.popleft()

    def _onboard(self, node: Node) -> None:
        """Bring a node in use back to the device; its parent is there already."""
        block_id = self.take_block()
        self._bring(node.host_slot, block_id, self._tokens_per_block)
        self.free_slots.append(node.host_slot)
        self._settle(node, block_id)

    def _bring(self, slot: int, block_id: int, num_tokens: int) -> None:
        """Copy a block from host memory to the device."""
        self.copies.append(BlockCopy(slot, block_id, num_tokens, CopyKind.ONBOARD))
        self.arrivals.expect(block_id)
        self.num_onboarded += 1

    def _settle(self, node: Node, block_id: int) -> None:
        """A node of host memory is in `block_id` from now on."""
        node.block_id, node.host_slot = block_id, NOWHERE
        assert node.parent is not None
        node.parent.num_device_children += 1
        self._announce_level(node, events.HOST_LEVEL, events.DEVICE_LEVEL)

    def _drop(self, node: Node) -> None:
        """Forget an unused node and everything below it."""
        gone = self.tree.remove(node)
        hashes = []
        for item in reversed(gone):
            assert item.num_users == 0
            if item.is_on_device:
                self.free.append(item.block_id)
                self.num_unused -= 1
            else:
                self.free_slots.append(item.host_slot)
            item.block_id = item.host_slot = NOWHERE
            item.expires_at = None
            if item.block_hash is not None:
                hashes.append(item.block_hash)
        if hashes:
            self._events.add(events.KvCacheRemovedData(tuple(hashes)))

    def _enlist(self, node: Node) -> None:
        """Add a node to the eviction candidates, if it may be evicted."""
        if node.is_device_leaf:
            self.victims.push(worth(node), node)
        elif node.is_host_leaf:
            self.host_victims.push(worth(node), node)

    def _expire(self) -> None:
        """Reset expired priorities to the default."""
        while (found := self._expiring.peek()) is not None and found[0][0] <= self._clock():
            node = found[1]
            node.expires_at = node.duration_s = None
            self._set_priority(node, DEFAULT_PRIORITY)
            self._enlist(node)

    # ---- events ----

    def _set_priority(self, node: Node, priority: int) -> None:
        old, node.priority = node.priority, priority
        if node.block_hash is not None and old != priority:
            change = events.Change(old, priority)
            self._events.add(events.KvCacheUpdatedData(node.block_hash, priority=change))

    def _announce(self, node: Node) -> None:
        if not self._events.is_on:
            return
        parent = node.parent
        assert parent is not None
        node.block_hash = events.block_hash(parent.block_hash, *node.key)
        block = events.KvCacheStoredBlockData(
            node.block_hash, node.key.tokens, events.DEVICE_LEVEL, node.priority, node.key.is_fp8
        )
        self._events.add(events.KvCacheStoredData(parent.block_hash, (block,)))

    def _announce_level(self, node: Node, old: int, new: int) -> None:
        if node.block_hash is not None:
            change = events.Change(old, new)
            self._events.add(events.KvCacheUpdatedData(node.block_hash, cache_level=change))
