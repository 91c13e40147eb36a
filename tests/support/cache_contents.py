"""What the caches of target and draft contain, told from the steps and copies alone."""

from __future__ import annotations

from llmctl.runtime.kv_cache import CopyKind
from llmctl.runtime.request import FinishReason

RUNNING = FinishReason.NOT_FINISHED
VOCABULARY = 2  # so that prompts and outputs of different sequences often coincide


def prefix_hashes(tokens, context_end=0):
    """For each position, a value that depends on all tokens up to it, and on which of them were
    computed with FP8 products."""
    hashes, state = [], 0
    for position, token in enumerate(tokens):
        state = hash((state, token, position < context_end))
        hashes.append(state)
    return hashes


def drafted(sequence):
    """Tokens that are valid in the draft's cache; none where there is no draft."""
    return sum(sequence.kv_lens[1:])


class Contents:
    """What one engine's KV cache holds."""

    def __init__(self, tokens_per_block):
        self.size = tokens_per_block
        self.slots = {}
        self.host = {}
        self.under_way = []  # (batch, block, what will be in its slots), in the order of landing

    def copy_block(self, copy, batch, is_aside):
        """What comes from host memory may land later, and then over whatever is there."""
        source = self.host if copy.kind is CopyKind.ONBOARD else self.slots
        destination = self.host if copy.kind is CopyKind.OFFLOAD else self.slots
        if copy.kind is not CopyKind.ONBOARD:
            blocks = {copy.src_block}
            blocks |= {copy.dst_block} if copy.kind is CopyKind.WITHIN else set()
            if any(block in blocks for _, block, _ in self.under_way):
                self.land(batch)
        content = [source.get((copy.src_block, offset)) for offset in range(copy.num_tokens)]
        if is_aside and copy.kind is CopyKind.ONBOARD:
            self.under_way.append((batch, copy.dst_block, content))
        else:
            destination.update({(copy.dst_block, i): value for i, value in enumerate(content)})

    def land(self, batch):
        """The copies of this batch and those before arrive."""
        while self.under_way and self.under_way[0][0] <= batch:
            _, block, content = self.under_way.pop(0)
            self.slots.update({(block, offset): value for offset, value in enumerate(content)})

    def write(self, sequence, tokens, start, end):
        hashes = prefix_hashes(tokens, sequence.context_end)
        for position in range(start, end):
            block = sequence.block_table[position // self.size]
            self.slots[block, position % self.size] = hashes[position]

    def check(self, sequence, end, is_seen=lambda position: True):
        hashes = prefix_hashes(sequence.tokens[:end], sequence.context_end)
        for position, expected in enumerate(hashes):
            if not is_seen(position):
                continue
            block = sequence.block_table[position // self.size]
            found = self.slots.get((block, position % self.size))
            assert found == expected, f"position {position} of block {block} is another's"

    def check_tree(self, tree, copies, counts=lambda node: True):
        unfinished = {block for _, block, _ in self.under_way} | {c.dst_block for c in copies}
        tokens, ends = {tree.root: ()}, {tree.root: 0}
        for node in tree.nodes():
            tokens[node] = tokens[node.parent] + node.key.tokens
            ends[node] = ends[node.parent] + self.size * node.key.is_fp8
            assert ends[node] in (ends[node.parent], len(tokens[node])), "16 bits, then FP8"
            if not counts(node) or (node.is_on_device and node.block_id in unfinished):
                continue
            place = node.block_id if node.is_on_device else node.host_slot
            held = self.slots if node.is_on_device else self.host
            found = [held.get((place, offset)) for offset in range(self.size)]
            wanted = prefix_hashes(tokens[node], ends[node])[-self.size :]
            assert found == wanted, "a block with a wrong token"
