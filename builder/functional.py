"""The operations in which a model definition is written. Each records one node and returns its
output.

They are mathematical steps, unfused: merging, fusing and quantizing is done by the passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from llmctl.builder.network import Attribute, Input, Node, Output, Tensor, current
from llmctl.builder.plan import Dim
from llmctl.builder.sources import Rows


def parameter(name: str, *shape: int) -> Tensor:
    """A checkpoint tensor in the model dtype."""
    network = current()
    return network.add_weight(name, Rows(((name, shape),), network.dtype))


def graph_input(
    name: str,
    *shape: Dim,
    source: tuple[str, str] | None = None,
    beside: Sequence[str] = (),
) -> Tensor:
    """A tensor in the model dtype that is there before the graph runs. source: (graph, output) of
    the graph that computes it; without one, whoever runs the graph writes it. beside: outputs of
    the base graph of which rows are copied there, side by side."""
    network = current()
    found = network.add_activation(f"{network.name}.{name}", network.dtype, shape)
    network.inputs[name] = Input(found.name, source, tuple(beside))
    return found


def graph_output(name: str, x: Tensor) -> None:
    """Make x an output of the graph."""
    current().outputs[name] = Output(x.name, for_all_tokens=x.shape[0] == "tokens")


def embedding(weight: Tensor, *, name: str, most: Dim = "tokens") -> Tensor:
    """weight [V, H] -> [tokens, H]: the rows named by the step's token ids. most: "requests" or
    "beams" in a head that reads one token for each."""
    return _record("embedding", name, {"weight": weight}, (most, weight.shape[1]))


def rms_norm(x: Tensor, weight: Tensor, epsilon: float, *, name: str) -> Tensor:
    """x / rms(x) * weight over the last axis."""
    return _record("rms_norm", name, {"x": x, "weight": weight}, x.shape, epsilon=epsilon)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, name: str, dtype: str | None = None
) -> Tensor:
    """x [N, K] times weight [O, K] transposed, plus bias [O]; `dtype` overrides the output's."""
    inputs = {"x": x, "weight": weight} | ({"bias": bias} if bias else {})
    return _record("linear", name, inputs, (x.shape[0], weight.shape[0]), dtype)


def add(x: Tensor, residual: Tensor, *, name: str) -> Tensor:
    """x + residual."""
    return _record("add", name, {"x": x, "residual": residual}, x.shape)


def silu(x: Tensor, *, name: str) -> Tensor:
    """x * sigmoid(x)."""
    return _record("silu", name, {"x": x}, x.shape)


def mul(x: Tensor, y: Tensor, *, name: str) -> Tensor:
    """x * y, element by element."""
    return _record("mul", name, {"x": x, "y": y}, x.shape)


def gpt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    *,
    name: str,
    layer: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    window: int,
    epsilon: float,
) -> Tensor:
    """Optional per-head RMSNorm of q and k, RoPE, KV cache update, causal attention.

    q [tokens, num_heads * head_size]; k, v [tokens, num_kv_heads * head_size]. window: 0 is full
    attention, otherwise the number of most recent positions a query sees, its own included.
    """
    inputs = {"q": q, "k": k, "v": v}
    if q_norm and k_norm:
        inputs |= {"q_norm": q_norm, "k_norm": k_norm}
    return _record(
        "gpt_attention",
        name,
        inputs,
        q.shape,
        layer=layer,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        softmax_scale=float(head_size) ** -0.5,
        window=window,
        epsilon=epsilon,
    )


def gather_rows(x: Tensor, *, name: str, most: Dim = "rows") -> Tensor:
    """x [tokens, H] -> [rows, H]: the tokens whose logits are wanted. most: "requests" in a head
    that computes one row for each sequence."""
    return _record("gather_rows", name, {"x": x}, (most, *x.shape[1:]))


def concat(x: Tensor, y: Tensor, *, name: str) -> Tensor:
    """x [N, H] and y [N, W] side by side -> [N, H + W]."""
    width, other = x.shape[1], y.shape[1]
    assert isinstance(width, int) and isinstance(other, int)
    return _record("concat", name, {"x": x, "y": y}, (x.shape[0], width + other))


def expand_logits(x: Tensor, index: Tensor, *, name: str) -> Tensor:
    """Logits of a reduced vocabulary x [N, D] as those of the whole one [N, V]: of token v column
    index[v], or minus infinity."""
    shape = (x.shape[0], *index.shape)
    return _record("expand_logits", name, {"x": x, "index": index}, shape, x.dtype)


def recurrence(
    x: Tensor, context: Tensor, carry: Tensor | None = None, *, name: str, silu: bool
) -> tuple[Tensor, Tensor]:
    """(what the step's rows keep and their states [N, 2 H], the states alone [N, H]): the states
    are x [N, H] plus, where there is one, the carry [R, H] of the rows that the step's logit_rows
    name, activated where asked for; of the context [R, W] of these rows the first H columns are
    kept."""
    inputs = {"x": x, "context": context} | ({"carry": carry} if carry else {})
    width = x.shape[1]
    assert isinstance(width, int)
    out = _record("recurrence", name, inputs, (x.shape[0], 2 * width), silu=silu)
    network = current()
    state = network.add_activation(f"{name}.state", network.dtype, x.shape)
    recorded = network.nodes[-1]
    network.nodes[-1] = replace(recorded, outputs={**recorded.outputs, "state": state.name})
    return out, state


def _record(
    op: str,
    name: str,
    inputs: dict[str, Tensor],
    shape: tuple[Dim, ...],
    dtype: str | None = None,
    **attributes: Attribute,
) -> Tensor:
    network = current()
    out = network.add_activation(f"{name}.out", dtype or network.dtype, shape)
    roles = {role: tensor.name for role, tensor in inputs.items()}
    network.nodes.append(Node(op, name, roles, {"out": out.name}, attributes))
    return out
