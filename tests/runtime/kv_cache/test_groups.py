"""Cache groups: each has a valid length of its own, however blocks are shared, moved and reused."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from support.kv import BLOCK, attached, make_sequence

from llmctl.runtime.kv_cache import BlockCopy, CopyKind, KvCacheManager
from llmctl.runtime.kv_cache.block_mover import BlockMover

GROUPS = ("target", "draft", "eagle")


def computed(cache, sequence_id, tokens, lens):
    """A sequence with so many tokens computed in each group, not published."""
    sequence = attached(cache, sequence_id, tokens)
    assert cache.reserve(sequence, len(tokens))
    sequence.kv_lens = list(lens)
    return sequence


def test_each_group_reuses_what_it_has_of_a_prefix():
    cache = KvCacheManager(16, BLOCK, groups=GROUPS)
    sequence = computed(cache, 1, range(17), [16, 8, 5])
    cache.publish(sequence)
    cache.check_invariants()
    assert attached(cache, 2, range(17)).kv_lens == [16, 8, 4]
    cache.release(sequence)
    assert sequence.kv_lens == [0, 0, 0]


def test_a_partly_equal_block_counts_for_the_groups_that_have_it_and_all_before_it():
    cache = KvCacheManager(16, BLOCK, groups=GROUPS)
    cache.publish(computed(cache, 1, range(9), [8, 8, 4]))
    assert attached(cache, 2, [0, 1, 2, 3, 4, 5, 99]).kv_lens == [6, 6, 4]


def test_a_group_that_catches_up_later_is_noted_in_shared_blocks():
    cache = KvCacheManager(16, BLOCK, groups=GROUPS)
    sequence = computed(cache, 1, range(17), [16, 0, 0])
    cache.publish(sequence)
    sequence.kv_lens[2] = 12
    cache.publish(sequence)
    cache.check_invariants()
    assert attached(cache, 2, range(17)).kv_lens == [16, 0, 12]


def test_two_that_computed_different_groups_of_a_block_end_up_with_both():
    """Only the group that the kept block lacks is copied: what it has would be overwritten."""
    cache = KvCacheManager(16, BLOCK, groups=GROUPS)
    first = computed(cache, 1, range(9), [4, 4, 0])
    second = computed(cache, 2, range(9), [4, 0, 4])
    own = second.block_table[0]
    cache.publish(first)
    cache.publish(second)
    (kept,) = {first.block_table[0], second.block_table[0]}
    assert cache.pending_copies() == [BlockCopy(own, kept, BLOCK, CopyKind.WITHIN, 0b100)]
    assert second.kv_lens == [4, 4, 4]
    assert attached(cache, 3, range(9)).kv_lens == [4, 4, 4]
    cache.check_invariants()


def test_the_mover_copies_in_each_group_what_concerns_it():
    class Holder:
        def __init__(self):
            self.copies = []

        def copy_blocks(self, copies):
            assert copies, "nothing to copy is not worth a call"
            self.copies += copies

    cache = KvCacheManager(16, BLOCK, groups=GROUPS)
    holders = {name: Holder() for name in reversed(GROUPS)}
    whole, part = BlockCopy(1, 2, BLOCK), BlockCopy(3, 4, BLOCK, groups=0b100)
    cache._store.copies += [part]
    mover = BlockMover(cache, holders)
    mover.start()
    assert [holders[name].copies for name in GROUPS] == [[], [], [part]]
    cache._store.copies += [whole]
    mover.start()
    assert [holders[name].copies for name in GROUPS] == [[whole], [whole], [part, whole]]


def invent_a_group(cache, sequence):
    cache._leases[sequence.sequence_id].tail.groups |= 0b1000


def forget_the_target(cache, sequence):
    cache._leases[sequence.sequence_id].tail.groups &= 0b110


def drop_a_length(cache, sequence):
    sequence.kv_lens.pop()


def stretch_a_length(cache, sequence):
    sequence.kv_lens[2] = 1000


@pytest.mark.parametrize(
    "corrupt",
    [invent_a_group, forget_the_target, drop_a_length, stretch_a_length],
)
def test_the_audit_notices_a_group_that_is_wrong(corrupt):
    cache = KvCacheManager(16, BLOCK, groups=GROUPS)
    sequence = computed(cache, 1, range(10), [8, 8, 8])
    cache.publish(sequence)
    cache.check_invariants()
    corrupt(cache, sequence)
    with pytest.raises(AssertionError):
        cache.check_invariants()


class GroupsMachine(RuleBasedStateMachine):
    """Sequences over two token values whose groups advance apart, against the contents of every
    block in every group, on the device and in host memory."""

    running = Bundle("running")

    @initialize(num_host_blocks=st.integers(0, 4), num_groups=st.integers(1, 3))
    def begin(self, num_host_blocks, num_groups):
        self.size, self.next_id = 2, 0
        self.cache = KvCacheManager(
            8, self.size, groups=GROUPS[:num_groups], num_host_blocks=num_host_blocks
        )
        self.device = [{} for _ in range(num_groups)]  # by (block, offset), the prefix computed
        self.host = [{} for _ in range(num_groups)]
        self.sequences = []

    def copy(self):
        """What the mover does before each step."""
        for copy in self.cache.pending_copies():
            for group in range(len(self.device)):
                if copy.groups >> group & 1:
                    is_up, is_down = copy.kind is CopyKind.ONBOARD, copy.kind is CopyKind.OFFLOAD
                    source = (self.host if is_up else self.device)[group]
                    destination = (self.host if is_down else self.device)[group]
                    for offset in range(copy.num_tokens):
                        content = source.get((copy.src_block, offset))
                        destination[copy.dst_block, offset] = content

    @rule(target=running, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def attach(self, tokens):
        sequence = make_sequence(self.next_id, tokens)
        self.next_id += 1
        self.cache.match_and_attach(sequence)
        self.sequences.append(sequence)
        self.copy()
        return sequence

    @rule(sequence=running, token=st.integers(0, 1), num_tokens=st.integers(1, 5))
    def generate(self, sequence, token, num_tokens):
        sequence.tokens += [token] * num_tokens

    @rule(sequence=running, group=st.integers(0, 2), num_tokens=st.integers(1, 8))
    def compute(self, sequence, group, num_tokens):
        """One group goes on; none goes further than the first, as the loop has it."""
        group %= len(self.device)
        start = sequence.kv_lens[group]
        most = len(sequence.tokens) - 1 if group == 0 else sequence.kv_lens[0]
        end = min(start + num_tokens, most)
        if end <= start or not self.cache.reserve(sequence, end):
            return
        self.copy()
        for position in range(start, end):
            place = (sequence.block_table[position // self.size], position % self.size)
            self.device[group][place] = tuple(sequence.tokens[: position + 1])
        sequence.kv_lens[group] = end

    @rule(sequence=running)
    def publish(self, sequence):
        self.cache.publish(sequence)
        self.copy()

    @rule(sequence=consumes(running))
    def release(self, sequence):
        self.cache.release(sequence)
        self.sequences.remove(sequence)

    @invariant()
    def what_counts_as_valid_was_computed_in_the_group(self):
        self.cache.check_invariants()
        for sequence in self.sequences:
            for group, length in enumerate(sequence.kv_lens):
                for position in range(length):
                    place = (sequence.block_table[position // self.size], position % self.size)
                    assert self.device[group][place] == tuple(sequence.tokens[: position + 1])

    @invariant()
    def what_the_tree_says_of_a_group_was_computed_in_it(self):
        tree = self.cache._store.tree
        prefixes = {tree.root: ()}
        for node in tree.nodes():
            prefix = prefixes[node] = prefixes[node.parent] + node.key.tokens
            place = node.block_id if node.is_on_device else node.host_slot
            held = self.device if node.is_on_device else self.host
            for group, contents in enumerate(held):
                for offset in range(self.size if node.groups >> group & 1 else 0):
                    wanted = prefix[: len(prefix) - self.size + offset + 1]
                    assert contents[place, offset] == wanted


TestGroupsMachine = GroupsMachine.TestCase
TestGroupsMachine.settings = settings(max_examples=100, stateful_step_count=40)
