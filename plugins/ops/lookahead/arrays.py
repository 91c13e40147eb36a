"""What lookahead decoding keeps of requests on a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Columns of a head. The first four are the host's.
WIDTH, LAST, GUESSES, END_ID = 0, 1, 2, 3  # W, N - 1, G, the id that ends the text or -1
FILLED = 4  # levels of the window
POSITION = 5  # of the root
ROUND = 6  # what `RoundState.counter` was when drafts were made; -1: the host has written since
ROW_WIDTH = 7  # rows of logits of a request in that round
HEAD_WIDTH = 8

NUM_SEEDS = 64
ROWS = 2048  # of a pool
OWNER, COUNT, NGRAMS = 0, 1, 2  # columns of a pool's row: a token + 1, its n-grams, oldest first


@dataclass(frozen=True, slots=True)
class LookaheadSizes:
    """The most columns W, tokens of an n-gram N and guesses G of a request."""

    window: int
    ngram: int
    guesses: int

    @property
    def last(self) -> int:
        """Tokens of an n-gram behind its first: levels of a full window, too."""
        return self.ngram - 1

    @property
    def row_width(self) -> int:
        """Of a pool."""
        return NGRAMS + self.guesses * self.last


@dataclass(frozen=True, slots=True)
class LookaheadArrays:
    """Windows and pools of S requests, each in a slot of its own, which it keeps while it lives.
    All int32.

    What a window, its seeds and a pool are is said in runtime/drafting/lookahead/.
    """

    slots: torch.Tensor  # [B] of each request of a round
    heads: torch.Tensor  # [S, HEAD_WIDTH]
    windows: torch.Tensor  # [S, (N - 1) W]; level after level, W being the request's own
    seeds: torch.Tensor  # [S, NUM_SEEDS + 1]: how many, and the tokens
    ends: torch.Tensor  # [S, W] the node behind which a column's next token is drawn; -1: none
    texts: torch.Tensor  # [S, N - 1 + K + 1]: the last N - 1 tokens, -1 for none; then scratch
    pools: torch.Tensor  # [S, ROWS, row_width]
    sizes: LookaheadSizes

    @classmethod
    def allocate(
        cls,
        sizes: LookaheadSizes,
        num_slots: int,
        max_draft_len: int,
        device: str | torch.device,
    ) -> LookaheadArrays:
        """Arrays of zeros."""
        import torch

        def zeros(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        return cls(
            slots=zeros(num_slots),
            heads=zeros(num_slots, HEAD_WIDTH),
            windows=zeros(num_slots, sizes.last * sizes.window),
            seeds=zeros(num_slots, NUM_SEEDS + 1),
            ends=zeros(num_slots, sizes.window),
            texts=zeros(num_slots, sizes.last + max_draft_len + 1),
            pools=zeros(num_slots, ROWS, sizes.row_width),
            sizes=sizes,
        )

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them, in the order of a kernel's arguments."""
        return (
            self.slots,
            self.heads,
            self.windows,
            self.seeds,
            self.ends,
            self.texts,
            self.pools,
        )


def lookahead_bytes(sizes: LookaheadSizes, num_slots: int, max_draft_len: int) -> int:
    """Device memory of the arrays."""
    arrays = LookaheadArrays.allocate(sizes, num_slots, max_draft_len, "meta")
    return sum(int(tensor.nbytes) for tensor in arrays.tensors)
