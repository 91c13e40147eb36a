"""Pieces as TensorRT networks: every node is added by its operator's
`plugins/ops/<op>/tensorrt.py`.

Nothing is compiled here, so what a network computes can be checked quickly and without a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llmctl.builder.config import BuildConfig
from llmctl.builder.network import Tensor
from llmctl.builder.tensorrt.package import require
from llmctl.builder.tensorrt.pieces import Binding, Piece
from llmctl.builder.tensorrt.whole import TREE, WHOLE
from llmctl.plugins.backends.tensorrt.layers import ITensor, Layers, Wanted
from llmctl.plugins.backends.tensorrt.packages import shared_logger
from llmctl.plugins.core.operators import operator_module
from llmctl.plugins.device_loop.tensorrt import accept_chain, accept_tree, choose_tokens

Range = tuple[int, int, int]  # least, the one to tune for, most
# Steps of generation and verification have up to so many tokens; longer ones hold prompt chunks.
_GENERATION_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Profile:
    """The sizes of one optimization profile, by the name of the dimension."""

    name: str
    sizes: Mapping[str, Range]

    def shape(self, binding: Binding, index: int) -> tuple[int, ...]:
        """The least (0), tuned (1) or largest (2) shape of a binding."""
        return tuple(
            self.sizes[dim][index] if isinstance(dim, str) else dim for dim in binding.shape
        )


@dataclass(frozen=True, slots=True)
class PieceNetwork:
    """One network, and everything that must live until it is built."""

    name: str
    network: Any  # INetworkDefinition
    layers: Layers
    builder: Any
    bindings: tuple[Binding, ...]
    profiles: tuple[Profile, ...]

    @property
    def constants(self) -> Mapping[str, Any]:
        """The array of every constant, by the name of its tensor."""
        return self.layers.constants


def build_networks(
    pieces: Iterable[Piece], limits: BuildConfig, plugin_config: Mapping[str, str], trt: Any
) -> dict[str, PieceNetwork]:
    """The network and the profiles of every piece, by its name."""
    return {piece.name: _build(piece, limits, plugin_config, trt) for piece in pieces}


def _build(
    piece: Piece, limits: BuildConfig, plugin_config: Mapping[str, str], trt: Any
) -> PieceNetwork:
    builder = trt.Builder(shared_logger(trt))
    network = builder.create_network(_creation_flags(trt))
    network.name = piece.name
    if piece.num_ranks > 1:
        require(trt, network, "add_dist_collective", "--tp-size")
    if piece.name in (WHOLE, TREE):
        require(trt, network, "add_attention_v2", "--kv-cache-type continuous")
    layers = Layers(trt, network, piece.num_ranks)
    values: dict[str, ITensor] = {}
    for binding in piece.bindings:
        if binding.is_input:
            shape = [dim if isinstance(dim, int) else -1 for dim in binding.shape]
            values[binding.name] = layers.input(binding.name, binding.dtype, shape)
    layers.step.update({name: values[name] for name in piece.step})
    if piece.name in (WHOLE, TREE):
        layers.scope = "step"
        for name in ("token_ids", "logit_rows"):  # the operators' are packed
            layers.step[name] = layers.shuffle(values[name], (-1,))
    for node in piece.nodes:
        layers.scope = node.name
        add = operator_module(node.op, "tensorrt").add_layers
        inputs = {role: values[name] for role, name in node.inputs.items()}
        wanted = {
            role: _wanted(piece.tensors[name])
            for role, name in node.outputs.items()
            if name in piece.tensors  # caches are not among them
        }
        made = add(layers, inputs, wanted, node.attributes)
        values |= {node.outputs[role]: tensor for role, tensor in made.items()}
    values |= {binding: values[tensor] for binding, tensor in piece.outputs.items()}
    if piece.name in (WHOLE, TREE):
        layers.step["logit_rows"] = values["logit_rows"]
        values |= _accept(layers, values["logits"])
    for binding in piece.bindings:
        if not binding.is_input:
            layers.output(values[binding.name], binding.name)
    if piece.name in (WHOLE, TREE):
        profiles = whole_profiles(limits, is_tree=piece.name == TREE)
    else:
        profiles = step_profiles(limits, plugin_config["multiple_profiles"] == "enable")
    return PieceNetwork(piece.name, network, layers, builder, piece.bindings, profiles)


def _accept(net: Layers, logits: ITensor) -> dict[str, ITensor]:
    """What a plan of the whole model decides by itself."""
    net.scope = "accept"
    tokens = choose_tokens(net, logits)
    found = {"tokens": tokens}
    if "drafts" in net.step:
        found |= accept_chain(net, tokens)
    if "ancestors" in net.step:
        found |= accept_tree(net, tokens)
    return found


def _wanted(tensor: Tensor) -> Wanted:
    return Wanted(tensor.dtype, tensor.shape)


def _creation_flags(trt: Any) -> int:
    """Strongly typed, which 10.x has to be told."""
    flag = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    return 0 if flag is None else 1 << int(flag)


def step_profiles(limits: BuildConfig, has_several: bool) -> tuple[Profile, ...]:
    """Packed steps: few tokens, tuned for a full batch, then any number, tuned for full chunks."""
    tokens, rows = limits.max_num_tokens, limits.max_num_rows
    few = min(_GENERATION_TOKENS, tokens)
    batch = min(limits.max_batch_size * (limits.max_draft_len + 1), few)
    generation = Profile(
        "generation", {"tokens": (1, batch, few), "rows": (1, min(batch, rows), min(rows, few))}
    )
    context = Profile(
        "context",
        {"tokens": (1, tokens, tokens), "rows": (1, min(limits.max_batch_size, rows), rows)},
    )
    if not has_several:
        return (Profile("all", {**context.sizes, "tokens": (1, batch, tokens)}),)
    return (generation, context) if few < tokens else (generation,)


def whole_profiles(limits: BuildConfig, is_tree: bool) -> tuple[Profile, ...]:
    """Padded steps: a chunk of one prompt, one token of each sequence, a verification of each."""
    batch = (1, limits.max_batch_size, limits.max_batch_size)
    chunk = min(limits.max_num_tokens, limits.max_seq_len)
    one, most = (1, 1, 1), limits.max_draft_len + 1
    several = (2, most, most)
    verify = _padded("verify", batch, several, several)
    if is_tree:
        return (verify,)
    context = _padded("context", one, (1, chunk, chunk), one)
    generation = _padded("generation", batch, one, one)
    return (context, generation, *([verify] if limits.max_draft_len else []))


def _padded(name: str, batch: Range, length: Range, rows: Range) -> Profile:
    least, tuned, most = rows
    drafts = (least - 1, tuned - 1, most - 1)
    return Profile(name, {"batch": batch, "length": length, "rows": rows, "drafts": drafts})
