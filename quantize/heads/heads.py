"""Draft heads as they come to be quantized. Who reads their checkpoints says what they are; one
function for each kind of heads (cli/quantize_heads.py has the table)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from llmctl.quantize.checkpoint import Checkpoint

if TYPE_CHECKING:
    import torch


class HeadModule(Protocol):
    """All heads as one torch module; its linears are torch's own, for ModelOpt."""

    def __call__(self, hidden: torch.Tensor, tokens: torch.Tensor) -> Iterable[torch.Tensor]:
        """hidden [rows, hidden_size] as the target's output projection reads them (or what
        `DraftHeads.taps` says), and the tokens [rows, DraftHeads.num_tokens] that follow each ->
        logits [rows, vocab_size] of each depth: of the token after the row's own next one, and so
        on. Heads that attend are given the rows of one text from its start."""

    def get_submodule(self, target: str) -> torch.nn.Module: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], *, assign: bool) -> Any: ...


@dataclass(frozen=True, slots=True)
class DraftHeads:
    """Heads that fit the target; no weight has been read.

    source: holds their tensors, each named as in the output behind `prefix`. linears: module paths
    of HeadModule -> names of the modules in the output. make: the module with weights on torch's
    meta device, given the target's output projection and its embedding.
    """

    source: Checkpoint
    prefix: str
    num_depths: int  # tokens that they draft in a row
    num_tokens: int  # behind a hidden row that HeadModule reads
    depth_word: str  # what drafts one of them, for people
    linears: Mapping[str, str]
    biases: tuple[str, ...]  # of the linears: paths of HeadModule that have one
    make: Callable[[torch.Tensor, torch.Tensor], HeadModule]
    file_name: str  # of the weights
    config: Mapping[str, Any]  # config.json
    # parameters that stay as they are: paths of HeadModule -> names in the output
    kept: Mapping[str, str] = field(default_factory=dict)
    copied: tuple[str, ...] = ()  # tensors that the output has as they are stored
    # layers of the target whose inputs, side by side, are `hidden`; none: its output projection's
    taps: tuple[int, ...] = ()
    attends: bool = False

    def shape(self, linear: str) -> tuple[int, ...]:
        """[out, in] of one of `linears`."""
        return self.source.info(f"{self.prefix}{self.linears[linear]}.weight").shape
