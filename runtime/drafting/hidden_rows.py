"""Which row of the target's last step each sequence's next drafts start from.

A step of the target leaves a hidden row beside each row of logits. The row of the last accepted
token, or of the prompt's last, gave the target's own token, the root of the next round; the same
row, read by a head, gives what may follow it:

    rows of a step   r | d0 d1 d2 ...     d1 accepted, then x, the target's own token
    a head reads           ^^             what may follow x

So there is no state but which row that was. A sequence that had no row in the last step (it waited,
or came back from a pause with all its blocks) drafts nothing this once.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Items
from typing import NamedTuple

from llmctl.runtime.drafting.drafts import ROOT, Drafts
from llmctl.runtime.request import Batch, Sequence


class _Root(NamedTuple):
    """What has rows in a step: the last token of `num_committed`, then its drafts."""

    sequence: Sequence
    num_committed: int
    drafts: Drafts


class HiddenRows:
    """The rows of all sequences, between one step and the next. The drafter of steps that the host
    controls and that of device rounds share one, so that either goes on from the other's last
    step."""

    def __init__(self) -> None:
        self._rows: dict[int, int] = {}  # by sequence id: of the last step
        self._roots: list[_Root] = []  # of the step under way, in the order of its rows

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._rows

    def row_of(self, sequence: Sequence) -> int:
        """The row of a sequence that has one."""
        return self._rows[sequence.sequence_id]

    def note(self, sequence: Sequence, row: int) -> None:
        """The last step was a device round, and this is the row of the sequence."""
        self._rows[sequence.sequence_id] = row

    def take(self) -> Mapping[int, int]:
        """The rows by sequence id; there are none after it: the step to come overwrites them, or
        fails."""
        rows, self._rows = self._rows, {}
        return rows

    def start(self, batch: Batch, drafts: Items[Drafts]) -> None:
        """The step of a batch with these drafts comes next."""
        none = Drafts()
        ends = [item for item in batch.context if item.needs_logits]
        self._roots = [
            *(_Root(item.sequence, item.start + item.num_tokens, none) for item in ends),
            *(
                _Root(item.sequence, item.start + item.num_tokens, own)
                for item, own in zip(batch.generation, drafts, strict=True)
            ),
        ]

    def commit(self, accepted: Items[int]) -> None:
        """It is over: so many drafts of each generation slice were accepted. Notes the row of each
        sequence's last accepted token."""
        prompts = len(self._roots) - len(accepted)
        row = 0
        for root, count in zip(self._roots, (*(0,) * prompts, *accepted), strict=True):
            path = root.sequence.tokens[root.num_committed : root.num_committed + count]
            self._rows[root.sequence.sequence_id] = row + 1 + end_of(root.drafts, path)
            row += 1 + len(root.drafts.tokens)
        self._roots = []

    def forget(self, sequence: Sequence) -> None:
        """A sequence ended."""
        self._rows.pop(sequence.sequence_id, None)


def end_of(drafts: Drafts, path: Items[int]) -> int:
    """The index of the last draft of an accepted path, by its tokens: siblings have different ones.
    ROOT where none was accepted; anything where a stop has cut the path, as nothing follows."""
    parents = drafts.parents
    if parents is None:
        return len(path) - 1
    last, depth = ROOT, 0
    for index, parent in enumerate(parents):  # parents come before their children
        if depth < len(path) and parent == last and drafts.tokens[index] == path[depth]:
            last, depth = index, depth + 1
    return last
