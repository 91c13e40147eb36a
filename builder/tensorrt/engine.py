"""The TensorRT part of an engine: its pieces compiled, as the plan describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from llmctl.builder.config import BuildConfig
from llmctl.builder.engine_format import TrtPiece
from llmctl.builder.tensorrt.compile import compile_network
from llmctl.builder.tensorrt.networks import build_networks
from llmctl.builder.tensorrt.package import Package
from llmctl.builder.tensorrt.pieces import Piece

OnPiece = Callable[[str, int, int], None]  # (name, pieces done, pieces in all)


def compile_pieces(
    package: Package,
    pieces: Sequence[Piece],
    limits: BuildConfig,
    plugin_config: Mapping[str, str],
    targets: Sequence[str],
    on_piece: OnPiece = lambda *_: None,
) -> tuple[tuple[TrtPiece, ...], dict[str, bytes]]:
    """(the pieces as the plan describes them, serialized plans by `TrtPiece.tensor`).

    Raises KernelCompileError.
    """
    described, plans = [], {}
    networks = build_networks(pieces, limits, plugin_config, package.trt)
    for index, (name, network) in enumerate(networks.items()):
        on_piece(f"plan {name}", index, len(networks))
        compiled = compile_network(package, network, targets)
        bindings = tuple(asdict(binding) for binding in network.bindings)
        piece = TrtPiece(
            name, len(compiled.plan), package.name, package.version, bindings, compiled.profiles
        )
        described.append(piece)
        plans[piece.tensor] = compiled.plan
    return tuple(described), plans
