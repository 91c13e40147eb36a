"""A process that a launcher started beside rank 0 becomes a follower."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from llmctl.builder.engine_format import read_engine_config
from llmctl.errors import BadConfig, LlmctlError
from llmctl.runtime.ranks.launch import find_world, shared_folders, world_of

if TYPE_CHECKING:
    from llmctl.runtime.open import EngineOptions


def serve_rank(options: EngineOptions) -> int | None:
    """The exit code of a whole run as one of its followers; None in rank 0, without ranks, and in
    every process that runs a copy of an engine of one rank.

    Options are those of rank 0: a launcher starts every rank with one command line.
    """
    try:
        world = find_world()
    except BadConfig:  # for `check_engines`, which raises it if the engine has several ranks
        return None
    if world is None or world.rank == 0:
        return None
    from llmctl.runtime.open import check_engines
    from llmctl.runtime.ranks.follower import follow, refuse

    try:
        if world_of(read_engine_config(options.engine_dir)) is None:
            return None
        folders: dict[str, Path] = shared_folders(check_engines(options).configs, options.folders)
    except LlmctlError as error:
        return refuse(world, error, options.rank_waits_s)
    return follow(world, folders, options.rank_waits_s)
