"""Heads of an engine in memory: graphs beside the base graph, which read what that computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from llmctl.builder.engine_format import Plan
from llmctl.errors import Unsupported
from llmctl.plugins.core.calls import StepInputs
from llmctl.runtime.engines.engine import make_calls

Found = TypeVar("Found")
_ROWS_AT_ONCE = 1024


class BoundHead:
    """One head of a plan; `tensors` are all of the plan's by name. Nothing here runs it."""

    def __init__(self, plan: Plan, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        graph = plan.heads[name]
        extents = {tensor.name: tensor.shape[0] for tensor in plan.tensors}
        self.name = name
        self.cache = graph.cache  # the KV cache that it attends to: one of `Plan.caches`
        self.calls = make_calls(plan, tensors, name)
        self.row_inputs = [tensors[t] for t in graph.inputs.values() if extents[t] == "rows"]
        self._given = {name: tensors[t] for name, t in plan.given_inputs(name).items()}
        self._outputs = {
            name: (tensors[t], extents[t] != "tokens") for name, t in graph.outputs.items()
        }

    def write_beside(self, name: str, sources: Sequence[torch.Tensor], rows: torch.Tensor) -> None:
        """Copy `rows` (int64, where the tensors are) of several tensors side by side to an
        input."""
        for tensor, part in self.side_by_side(name, sources):
            for first in range(0, len(rows), _ROWS_AT_ONCE):  # bounds what torch gathers them in
                some = rows[first : first + _ROWS_AT_ONCE]
                part[first : first + len(some)] = tensor[some]

    def write_first(self, name: str, sources: Sequence[torch.Tensor], count: int) -> None:
        """The same with the first `count` rows, and no memory but theirs."""
        for tensor, part in self.side_by_side(name, sources):
            part[:count].copy_(tensor[:count])

    def side_by_side(
        self, name: str, sources: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Each tensor, and the columns of an input that are its own."""
        given, column = self._given[name], 0
        for tensor in sources:
            yield tensor, given[:, column : column + tensor.shape[1]]
            column += tensor.shape[1]
        assert column == given.shape[1], f"the input {name} of {self.name} is {given.shape[1]} wide"

    def write(self, inputs: Mapping[str, torch.Tensor]) -> None:
        """Copy rows to where the head reads them. An input that is left out stays as it is."""
        for name, rows in inputs.items():
            assert name in self._given, (
                f"{self.name} is given {', '.join(self._given) or 'nothing'}"
            )
            self._given[name][: len(rows)].copy_(rows)

    def take(self, source: BoundHead, count: int) -> None:
        """Copy the first rows of what another head left, or this one, to inputs of these names."""
        self.write({name: source.output(name)[:count] for name in self._given})

    def given(self, name: str) -> torch.Tensor:
        """Where the head reads an input that no graph computes, at its full size."""
        return self._given[name]

    def output(self, name: str) -> torch.Tensor:
        """Where the head leaves an output, at its full size."""
        return self._outputs[name][0]

    def outputs(self, step: StepInputs) -> dict[str, torch.Tensor]:
        """What the head computed in this step."""
        return {
            name: tensor[: step.num_rows if has_rows else step.num_tokens]
            for name, (tensor, has_rows) in self._outputs.items()
        }


def find_head(heads: Mapping[str, Found], name: str) -> Found:
    """What is kept for a head. Raises Unsupported where the engine has none of that name."""
    if name not in heads:
        raise Unsupported(
            f"the engine was built without the head {name!r}; it has {', '.join(heads) or 'none'}",
            fix="build it again with the --speculative-decoding-mode that has that head",
        )
    return heads[name]


def bind_heads(plan: Plan, tensors: Mapping[str, torch.Tensor]) -> list[BoundHead]:
    """Every head of the plan."""
    return [BoundHead(plan, name, tensors) for name in plan.heads]
