"""The engine files of all ranks together: one plan, one size, and no file beside them."""

from __future__ import annotations

from pathlib import Path

from llmctl.builder.engine_format import (
    CONFIG_FILE,
    EngineConfig,
    Plan,
    engine_file,
    read_engine_config,
    read_plan,
)
from llmctl.errors import CorruptEngine


def num_ranks(config: EngineConfig) -> int:
    """Ranks that run the engine together."""
    return int(config.build_config.get("tp_size", 1))


def read_ranks(folder: Path) -> Plan:
    """The plan of all ranks, from the header of every file.

    Raises what `read_plan` raises, and CorruptEngine for plans that differ, and for other files
    than the ranks'.
    """
    config = read_engine_config(folder)
    wanted = [engine_file(rank) for rank in range(num_ranks(config))]
    if sorted(config.files) != sorted(wanted):
        raise CorruptEngine(
            f"{folder / CONFIG_FILE} lists the files {', '.join(sorted(config.files)) or 'none'}; "
            f"an engine of {len(wanted)} ranks has {', '.join(wanted)}",
            fix="build the engine again",
        )
    plan = read_plan(folder)
    for rank in range(1, len(wanted)):
        if read_plan(folder, rank) != plan:
            raise CorruptEngine(
                f"{folder / wanted[rank]} has another plan than {wanted[0]}; ranks would wait for "
                "each other at different places",
                fix="build the engine again",
            )
    return plan
