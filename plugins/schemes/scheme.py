"""What a weight scheme is: how checkpoints store a linear's weight, and what kernels read of it.

A scheme is data, cheap to import for every stage and the command line. Its code is in its folder
here (packed weights as tensors, CUDA sources) and in the tables of two stages:
`builder/schemes/table.py` (reading) and `quantize/schemes/table.py` (calibration and writing).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

if TYPE_CHECKING:
    import torch

E8M0 = "U8"  # dtype of scales that are powers of two: 2**(value - 127), 255 is NaN
E8M0_BIAS = 127


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What the blocks of a packed weight are (plugins/ops/packed_linear/layout.py).

    If the elements are the numbers that the tensor core multiplies, the form has the name of their
    dtype. Otherwise they are codes, and several schemes may store codes with the same dtype. So a
    form of codes has the name of its scheme, and a plan states it (attribute `scheme`). The last
    four fields are for codes alone.
    """

    name: str
    dtype: str  # of the elements, torch's name
    numbers: str  # dtype that the tensor core multiplies
    word: str  # in names of kernels
    block_bytes: int  # of 64 rows
    columns: int  # of K, in a block
    token_chunks: int = 1  # chunks of 128 bytes of a token that one block is multiplied by
    interval: int = 4  # blocks of one interval of an FP8 sum: 512 columns
    spread: float | None = None  # standard deviation of random weights before scaling; None: any
    macro: str = ""  # macro of CUDA sources: 1 for these codes, 0 for all other forms
    table_bytes: int = 0  # shared memory of the table in which codes are looked up
    expansion: str = ""  # CUDA source (below plugins/) that writes the numbers of a whole weight
    packing: str = ""  # module that is a `Packing`

    @property
    def is_coded(self) -> bool:
        """Whether the elements are codes, which kernels convert to numbers."""
        return self.dtype != self.numbers

    @property
    def row_elements(self) -> int:
        """Elements of a row of a block. Codes are bytes."""
        return self.block_bytes // 64 if self.is_coded else self.columns

    @property
    def attributes(self) -> dict[str, int | float | str | bool]:
        """Attributes of a product with such a weight in a plan."""
        return {"scheme": self.name} if self.is_coded else {}


class Packing(Protocol):
    """What the module `packing` of a form of codes has. Packed weights are [RT, KT, 64, C]."""

    def unpack(self, packed: torch.Tensor, rows: int, inner: int) -> torch.Tensor:
        """The numbers [rows, inner], in packed row order."""

    def pack_halves(self, weight: torch.Tensor) -> torch.Tensor:
        """A weight [rows, K] of multiples of 1/2 from -1.5 to 1.5, packed; exact."""

    def pack_random(
        self, order: torch.Tensor, inner: int, generator: torch.Generator
    ) -> torch.Tensor:
        """Random codes [len(order), inner], packed; rows where order is -1 are zero."""

    def fill_random(self, packed: torch.Tensor, generator: torch.Generator) -> None:
        """Fill a packed weight, in place, with random numbers of the form's `spread`."""


def packing_of(form: Form) -> Packing:
    """The code of a form of codes."""
    return cast(Packing, import_module(form.packing))


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """One way to keep the weights of linears."""

    name: str
    title: str  # for people
    weight_bytes: float  # bytes per weight, in a checkpoint and in an engine for GPUs
    forms: tuple[Form, ...]  # packed for GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How a checkpoint holds the weight [rows, columns] of a linear m: as m.weight, with scales in
    m.weight_scale. dtypes are safetensors' names."""

    dtype: str
    values: int = 1  # columns in an element
    block: int | None = None  # columns that share a scale; None: one per tensor or row, any float
    scale_dtype: str = "F32"
    scale_text: str = ""  # what the scales of blocks are, for messages

    def weight_shape(self, rows: int, columns: int) -> tuple[int, ...]:
        """Of m.weight."""
        return (rows, columns // self.values)

    def scale_shape(self, rows: int, columns: int, *, is_channel: bool = False) -> tuple[int, ...]:
        """Of m.weight_scale: one scale per block, per row (is_channel) or per tensor."""
        if self.block is not None:
            return (rows, columns // self.block)
        return (rows, 1) if is_channel else ()


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A quantization as ModelOpt names it (quant_algo), and what the name says about scales."""

    name: str
    weight_strategy: str  # "tensor", "channel" or "group"
    activations: str  # "static" or "dynamic"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedScheme(WeightScheme):
    """A scheme of quantized checkpoints."""

    algorithms: tuple[Algorithm, ...]  # read; `llmctl quantize` writes the first
    storage: Storage
    activation_dtype: str  # of the inputs of products, torch's name
    activations: tuple[str, ...]  # supported scales of inputs: "static", "dynamic" (per token)
    qformat: str  # --qformat of `llmctl quantize`

    @property
    def algo(self) -> str:
        """The quant_algo that `llmctl quantize` writes."""
        return self.algorithms[0].name
