"""Can an engine verify the drafts of a window? Asked of its config.json alone."""

from __future__ import annotations

from llmctl.builder.engine_format import EngineConfig, LookaheadDecodingConfig
from llmctl.errors import PairMismatch, Unsupported
from llmctl.runtime.drafting.lookahead.method import MODE
from llmctl.runtime.drafting.target_check import is_built_for


def check_engine(
    target: EngineConfig, config: LookaheadDecodingConfig | None, draft_len: int | None
) -> int:
    """The most drafts of a round: `draft_len`, or all of the window and its guesses.

    config: None is what the engine was built with. Raises PairMismatch where the engine was built
    without sizes or has no room for these, Unsupported where it verifies chains alone.
    """
    build = target.build_config
    if build["kv_cache_type"] == "CONTINUOUS":
        rebuild = "rebuild the engine with --kv-cache-type paged"
        raise Unsupported(
            "lookahead decoding drafts trees; an engine with --kv-cache-type continuous verifies "
            "chains",
            fix=f"--ngram-config, or {rebuild}" if build["max_draft_len"] else rebuild,
            general_fix=rebuild,
        )
    chosen = config or built_config(target)
    wanted, most = chosen.max_draft_len, int(build["max_draft_len"])
    if wanted > most:
        rebuild = _rebuild(str(chosen))
        raise PairMismatch(
            f"--lookahead-config [{chosen}] is {wanted} drafts per round, (N - 2) + (W - 1 + G) * "
            f"(N - 1); the engine was built for max_draft_len {most}",
            fix=f"smaller sizes, or {rebuild}" if most else rebuild,
            general_fix=rebuild,
        )
    if draft_len is not None and draft_len > wanted:
        raise PairMismatch(
            f"{draft_len} drafts per round are requested; "
            f"--lookahead-config [{chosen}] has {wanted}",
            fix=f"--draft-len {wanted}, or leave it out",
        )
    return wanted if draft_len is None else draft_len


def built_config(target: EngineConfig) -> LookaheadDecodingConfig:
    """The sizes that the engine was built with; that config.json's facts are whole was asked when
    it was read. Raises PairMismatch where it was built without."""
    facts = target.build_config.get("draft_heads")
    if not is_built_for(target, MODE) or not facts:
        rebuild, has_room = _rebuild("W,N,G"), bool(target.build_config["max_draft_len"])
        raise PairMismatch(
            "the engine was built without --lookahead_config, so that auto says nothing",
            fix=f'--lookahead-config "[W,N,G]", or {rebuild}' if has_room else rebuild,
            general_fix=rebuild,
        )
    return LookaheadDecodingConfig(**facts)


def _rebuild(sizes: str) -> str:
    return (
        f"rebuild it with: llmctl build --speculative_decoding_mode {MODE} "
        f'--lookahead_config "[{sizes}]"'
    )
