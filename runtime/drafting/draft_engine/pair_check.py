"""Can these engines work together? Decided from their config.json, before any weight is read.

Without this check, common mistakes show up as a crash in the first step, or as correct text that is
no faster: swapped engines, a target built without room for drafts, tokenizers that look alike.
"""

from __future__ import annotations

from llmctl.builder.engine_format import EngineConfig
from llmctl.errors import PairMismatch, Unsupported
from llmctl.plugins.backends.backend import BACKENDS
from llmctl.runtime.drafting.draft_engine.tree import OPTION, DraftTree
from llmctl.runtime.drafting.method import EXTERNAL_DRAFTS
from llmctl.runtime.drafting.target_check import check_target, is_built_for, require_continued


def check_pair(
    target: EngineConfig, draft: EngineConfig, draft_len: int | None, tree: DraftTree | None = None
) -> int:
    """The draft length to use. Raises PairMismatch naming both values.

    Allowed to differ: model family, dtype and quantization; the padded vocabulary width, as long
    as the tokenizers have the same content; max_batch_size (the draft runs in groups); and
    max_seq_len (beyond the draft's, generation goes on without drafts).
    """
    if is_built_for(draft, EXTERNAL_DRAFTS) and not is_built_for(target, EXTERNAL_DRAFTS):
        raise PairMismatch(
            "draft and target look swapped: the engine given as draft was built with "
            f"--speculative_decoding_mode {EXTERNAL_DRAFTS}, the one given as target was not",
            fix="swap the values of --engine-dir and --draft-engine",
            general_fix="swap the two engines",
        )
    less = (
        "lower the draft length to" if tree is None else f"give a {OPTION} whose nodes are at most"
    )
    chosen = check_target(target, draft_len, less=less)
    _require_equal("backend", target.backend, draft.backend)
    _check_vocabulary(target, draft)
    _require_equal(
        "tokens_per_block",
        target.build_config["tokens_per_block"],
        draft.build_config["tokens_per_block"],
        fix="rebuild one of them with the other's --tokens_per_block",
    )
    return chosen


def require_trees(target: EngineConfig, draft: EngineConfig, tree: DraftTree) -> None:
    """Raises Unsupported where the backend or an engine has no attention along trees in the making,
    PairMismatch where the draft engine computes fewer tokens of a sequence at once than a level
    needs."""
    require_continued(target, "trees from a draft engine", f"leave {OPTION} out")
    for role, config in (("target", target), ("draft", draft)):
        if config.has_fp8_generation:
            rebuild = f"rebuild the {role} with --use_fp8_generation_fmha disable"
            raise Unsupported(
                f"{OPTION} {tree} drafts trees, and the {role} engine was built with "
                "--use_fp8_generation_fmha enable, whose kernels compute chains",
                fix=f"leave {OPTION} out, or {rebuild}",
                general_fix=f"draft chains, or {rebuild}",
            )
    most = 1 + int(draft.build_config["max_draft_len"])
    # On a GPU a path may be as long as the engine's drafts, and one for fewer than three tokens has
    # no kernels for trees. What is followed one by one is a chain.
    least = max(tree.depth, 3) if BACKENDS[draft.backend].on_gpu and tree.width > 1 else 1
    wanted = max(tree.width, least)
    if tree.depth > 1 and wanted > most:
        rebuild = (
            f"rebuild it with --speculative_decoding_mode {EXTERNAL_DRAFTS} "
            f"--max_draft_len {wanted - 1}"
        )
        raise PairMismatch(
            f"{OPTION} {tree} needs {wanted} tokens of a sequence in a step of the draft engine; "
            f"it was built for {most}",
            fix=f"{rebuild}, or give a smaller tree",
            general_fix=rebuild,
        )


def _check_vocabulary(target: EngineConfig, draft: EngineConfig) -> None:
    """Same tokenizer content; without tokenizers, at least the same width."""
    hashes = target.tokenizer.get("hash"), draft.tokenizer.get("hash")
    fix = "use a draft of the target's own family, built from its own tokenizer files"
    if hashes[0] != hashes[1]:
        raise PairMismatch(
            f"the tokenizers differ: the target's content hash is {_short(hashes[0])}, "
            f"the draft's {_short(hashes[1])}",
            fix=fix,
        )
    widths = int(target.pretrained_config["vocab_size"]), int(draft.pretrained_config["vocab_size"])
    num_tokens = target.tokenizer.get("vocab_size")
    if num_tokens is None:
        _require_equal("vocab_size", *widths, fix=fix)
    elif min(widths) < num_tokens:
        raise PairMismatch(
            f"the tokenizer has {num_tokens} tokens; vocab_size is {widths[0]} in the target "
            f"and {widths[1]} in the draft",
            fix=fix,
        )


def _short(content_hash: object) -> str:
    return str(content_hash)[:12] if content_hash else "none (built without tokenizer files)"


def _require_equal(name: str, target: object, draft: object, fix: str = "") -> None:
    if target != draft:
        raise PairMismatch(
            f"{name} is {target!r} in the target and {draft!r} in the draft", fix=fix
        )
