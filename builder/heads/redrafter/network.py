"""A ReDrafter head as two graphs beside the base graph: the first step of a round, and every other.

A step reads a token of each row and gives logits of what follows it:

    first   h: the base graph's last hidden row, that the target's own token was drawn from
            s = SiLU(W e + b), e the target's embedding of that token
    next    the row that it continues, as the step before left it: h, and U s + b
            s = SiLU(W e + (U s + b))

    x = [h; s], through the input projection where there is one
    x = x + SiLU(linear(x) + bias)     for each layer
    logits = linear(x)                 [rows, vocab_size] float32

Other recurrences differ as RECURRENCES says. Token ids and, as logit_rows, the rows that are
continued are arrays of the graph's own step, so whoever writes those, host or device, can run the
next step without the other. What a step hands on is an output of one graph and an input of the
next, and is copied: there are few rows, and no graph then writes over what it reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from llmctl.builder.functional import (
    add,
    embedding,
    graph_input,
    graph_output,
    linear,
    parameter,
    recurrence,
    silu,
)
from llmctl.builder.heads.redrafter.names import CARRY, CONTEXT, FIRST, MODULE, NEXT
from llmctl.builder.models.decoder import EMBEDDING, HIDDEN
from llmctl.builder.network import Network, Tensor, recording
from llmctl.builder.plan import BASE


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records the graphs of one head."""

    recurrence: str
    num_layers: int
    hidden_size: int
    exit_dim: int
    vocab_size: int
    dtype: str

    def record(self) -> list[Network]:
        """Both graphs. Rows of the first are requests, those of the other are beams of them."""
        width = self.hidden_size
        with recording(Network(self.dtype, name=FIRST)) as first:
            hidden = graph_input(HIDDEN, "rows", width, source=(BASE, HIDDEN))
            x = self._take_in(FIRST, "requests", is_first=True)
            self._finish(FIRST, x, hidden)
        with recording(Network(self.dtype, name=NEXT)) as following:
            context = graph_input(CONTEXT, "beams", 2 * width)
            carry = graph_input(CARRY, "beams", width)
            self._finish(NEXT, self._take_in(NEXT, "beams"), context, carry)
        return [first, following]

    def _take_in(self, graph: str, rows: str, *, is_first: bool = False) -> Tensor:
        """What the step's tokens add to a state."""
        table = parameter(f"{EMBEDDING}.weight", self.vocab_size, self.hidden_size)
        x = embedding(table, name=f"{graph}.embedding", most=rows)
        if self.recurrence == "sum":
            return x
        has_bias = is_first and self.recurrence == "silu"
        bias = parameter(f"{MODULE}.rnn_u.bias", self.hidden_size) if has_bias else None
        weight = parameter(f"{MODULE}.rnn_w.weight", self.hidden_size, self.hidden_size)
        return linear(x, weight, bias, name=f"{graph}.rnn_w")

    def _finish(self, graph: str, x: Tensor, context: Tensor, carry: Tensor | None = None) -> None:
        is_activated = self.recurrence == "silu"
        out, state = recurrence(x, context, carry, name=f"{graph}.recurrence", silu=is_activated)
        graph_output(CONTEXT, out)
        x = out
        if self.exit_dim != 2 * self.hidden_size:
            x = self._linear(graph, "input_proj", x, self.exit_dim)
        for layer in range(self.num_layers):
            name = f"layers.{layer}"
            gate = silu(self._linear(graph, f"{name}.linear", x, self.exit_dim),
                        name=f"{graph}.{name}.act")  # fmt: skip
            x = add(gate, x, name=f"{graph}.{name}.residual")
        weight = parameter(f"{MODULE}.lm_head.weight", self.vocab_size, self.exit_dim)
        graph_output("logits", linear(x, weight, name=f"{graph}.lm_head", dtype="float32"))
        if self.recurrence != "sum":  # last: whoever takes no next step can leave it out
            state = self._linear(graph, "rnn_u", state, self.hidden_size)
        graph_output(CARRY, state)

    def _linear(self, graph: str, name: str, x: Tensor, width: int) -> Tensor:
        inner = x.shape[1]
        assert isinstance(inner, int)
        weight = parameter(f"{MODULE}.{name}.weight", width, inner)
        bias = parameter(f"{MODULE}.{name}.bias", width)
        return linear(x, weight, bias, name=f"{graph}.{name}")
