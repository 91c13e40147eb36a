"""A recount of everything, for tests: slow, and independent of the counters it checks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from llmctl.runtime.kv_cache.eviction import worth
from llmctl.runtime.kv_cache.lease import Lease
from llmctl.runtime.kv_cache.radix_tree import NOWHERE, Key, Node, path_to
from llmctl.runtime.kv_cache.store import BlockStore


def check_leases(
    leases: Iterable[Lease],
    store: BlockStore,
    tokens_per_block: int,
    null_block: int | None,
    num_groups: int,
) -> None:
    """Recount all leases and the store; AssertionError on the first contradiction. `null_block`
    takes the place of blocks that were given back."""
    size = tokens_per_block
    users: dict[Node, int] = {}
    private = [] if null_block is None else [null_block]
    for lease in leases:
        sequence, tail = lease.sequence, lease.tail
        own = sequence.block_table[tail.depth :]
        kept = [block for block in own if block != null_block]
        assert len(own) - len(kept) == lease.num_dropped
        private += kept
        assert len(sequence.kv_lens) == len(lease.num_computed) == num_groups
        assert max(sequence.kv_lens) <= len(sequence.block_table) * size
        assert max(lease.num_computed) <= tail.depth, "a group counts blocks that are not there"
        for index, node in enumerate(path_to(tail)):
            assert sequence.block_table[index] == node.block_id
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            assert Key(tokens, index * size < sequence.context_end) == node.key
            users[node] = users.get(node, 0) + 1
    check_store(store, users, private)
    for node in store.tree.nodes():
        assert node.groups & 1 and node.groups < 1 << num_groups, "groups that there are not"


def check_store(store: BlockStore, users: Mapping[Node, int], private: list[int]) -> None:
    """Recount everything, given how many sequences use each node and the blocks that belong
    to one sequence alone; AssertionError on the first contradiction."""
    nodes = store.tree.nodes()
    assert set(users) <= set(nodes), "a sequence uses a node that is not in the tree"
    on_device = [node for node in nodes if node.is_on_device]
    slots = [node.host_slot for node in nodes if not node.is_on_device]
    for node in nodes:
        assert node.parent is not None
        assert node.num_users == users.get(node, 0), f"block {node.block_id}: wrong user count"
        assert node.is_on_device != (node.host_slot != NOWHERE)
        assert node.is_on_device or not node.num_users, "a block in use lies in host memory"
        assert node.parent.is_on_device or node.depth == 1 or not node.is_on_device
        assert node.num_users <= node.parent.num_users or node.depth == 1
        count = sum(child.is_on_device for child in node.children.values())
        assert node.num_device_children == count
        heap = store.victims if node.is_on_device else store.host_victims
        if node.is_device_leaf or node.is_host_leaf:
            assert heap.has(worth(node), node), "a leaf that cannot be evicted"
    assert store.num_unused == sum(node.num_users == 0 for node in on_device)
    blocks = sorted(store.free + private + [node.block_id for node in on_device])
    assert blocks == list(range(len(blocks))), "a block leaked or has two owners"
    assert sorted([*store.free_slots, *slots]) == list(range(store.num_host_blocks))
    assert len(blocks) == store.num_blocks
