"""--speculative_decoding_mode medusa: the heads, their tree, and the limits that follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmctl.builder.heads.medusa.layouts import OWN, Layout
from llmctl.builder.heads.medusa.tree import DEFAULT, OPTION, MedusaTree, parse_choices
from llmctl.errors import BadConfig

if TYPE_CHECKING:
    from llmctl.builder.config import BuildRequest
    from llmctl.builder.models.family import ModelConfig
    from llmctl.builder.network import Network
    from llmctl.quantize.checkpoint import Checkpoint


def prepare_medusa(
    request: BuildRequest, model: ModelConfig, checkpoint: Checkpoint
) -> tuple[BuildRequest, Checkpoint, Mapping[str, Any]]:
    """See BuildMode. Reads headers alone.

    Raises what `open_heads` raises, PairMismatch (heads of another target) and BadConfig (more
    heads than there are, a tree that does not fit them or the draft length).
    """
    from llmctl.builder.heads.medusa.checkpoint import open_heads, require_fit

    folder = request.draft_model_dir
    heads = open_heads(None if folder is None else Path(folder), checkpoint)
    require_fit(heads, model.hidden_size, model.vocab_size)
    most = heads.layout.num_heads
    num_heads = request.num_medusa_heads or most
    if num_heads > most:
        raise BadConfig(
            f"--num-medusa-heads is {num_heads}; {heads.where} holds {most} heads",
            fix=f"--num-medusa-heads {most}, or leave it out",
        )
    limits, facts = _decide(request, replace(heads.layout, num_heads=num_heads))
    return limits, heads.beside(checkpoint, num_heads), facts


def invent_medusa(
    request: BuildRequest, model: ModelConfig
) -> tuple[BuildRequest, Mapping[str, Any]]:
    """See BuildMode: heads of one block, as many as the tree is deep. Raises BadConfig."""
    if request.draft_model_dir is not None:
        raise BadConfig(
            "--draft-model-dir names heads to read; --load-format dummy and planted generate them",
            fix="leave it out; --num-medusa-heads says how many",
        )
    tree = MedusaTree(DEFAULT)
    if request.medusa_choices is not None:
        tree = parse_choices(request.medusa_choices)
    num_heads = request.num_medusa_heads or tree.depth
    return _decide(request, Layout(num_heads, num_layers=1, has_bias=True, output=OWN))


def record_heads(model: ModelConfig, dtype: str, facts: Mapping[str, Any]) -> Sequence[Network]:
    """The one graph that all heads are."""
    from llmctl.builder.heads.medusa.network import record_medusa

    return [record_medusa(model, facts, dtype)]


def _decide(request: BuildRequest, layout: Layout) -> tuple[BuildRequest, dict[str, Any]]:
    """The limits with the tree in them, and what config.json keeps."""
    tree = _choose_tree(request, layout.num_heads)
    facts = {**asdict(layout), "choices": [list(path) for path in tree.paths]}
    return replace(request, max_draft_len=request.max_draft_len or tree.num_nodes), facts


def describe(facts: Mapping[str, Any]) -> str:
    """The heads as `inspect` shows them."""
    return (
        f"{facts['num_heads']} (medusa) of {facts['num_layers']} residual blocks, "
        f"a tree of {len(facts['choices'])} drafts"
    )


def _choose_tree(request: BuildRequest, num_heads: int) -> MedusaTree:
    """The tree asked for; else as much of the published one as heads and draft length allow."""
    most = request.max_draft_len
    if request.medusa_choices is None:
        published = MedusaTree(DEFAULT).of_depth(num_heads)
        return MedusaTree(published.paths[:most]) if most else published
    tree = parse_choices(request.medusa_choices)
    if tree.depth > num_heads:
        raise BadConfig(
            f"{OPTION} holds a path of {tree.depth} tokens; {num_heads} heads draft {num_heads}",
            fix=f"shorten the paths to {num_heads} elements",
        )
    if most and tree.num_nodes > most:
        raise BadConfig(
            f"{OPTION} has {tree.num_nodes} nodes, --max-draft-len is {most}",
            fix=f"--max-draft-len {tree.num_nodes}, or leave it out",
        )
    return tree
