"""The program on edited engines: it ends well or with a named error, never as a bug of ours."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.hostile_engine import KINDS, PROMPT, HostileEngine, write_directory
from support.hostile_heads import METHODS
from support.json_edits import ACTIONS, apply

from llmctl.cli.endings import EXIT_BUG
from llmctl.cli.main import execute

VALUES = (0, -1, 1, 7, 2**31, 2**62, -(2**62), "rows", "evil", "float32", "cpu", "cuda", "tensorrt",
          None, [2], 0.5, {}, True, "..", "/etc/passwd", {"a": 1}, [[]], 1e300)  # fmt: skip
PARTS = ("pretrained_config", "build_config", "build_config", "tokenizer", "weights", "plan", "")


@pytest.mark.parametrize("kind", KINDS)
def test_the_program_ends_well_or_names_what_is_wrong(
    engines: dict[str, tuple[HostileEngine, list[int]]],
    tmp_path: Path,
    repository: Path,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
    kind: str,
) -> None:
    prompts, folder = tmp_path / "prompts.csv", tmp_path / "engine"
    prompts.write_text(",".join(map(str, PROMPT)) + "\n")
    options: list[str] = ["--input-file", str(prompts), "--max-output-len", "4"]
    options += ["--tokenizer-dir", str(repository / "examples/demo-target")]
    engine, raw = engines[kind][0], engines[kind][0].bytes()
    codes: list[int] = []
    for number in range(max(2, pytestconfig.getoption("--fuzz-cases") // 120)):
        edit = random_edit(random.Random(f"{kind} {number}"))
        part, changed = edit[0], engine.copy()
        if part == "plan":
            apply(changed.plan, edit[1])
            changed.write(folder)
        else:
            config = json.loads(json.dumps(engine.config))
            apply(config[part] if part else config, edit[1])
            write_directory(folder, config, raw)
        drafts = METHODS[kind][1] if kind in METHODS else ("--draft-engine", str(folder))
        for command in (
            ["run", "--engine-dir", str(folder), *options],
            ["run", "--engine-dir", str(folder), *drafts, *options],
            ["inspect", str(folder), "--verify"],
        ):
            codes.append(execute(command))
            told = capsys.readouterr().err
            assert codes[-1] in (0, 1, 2, 3, 4) and codes[-1] != EXIT_BUG, (edit, told)
            assert codes[-1] == 0 or told.startswith("error["), (edit, told)
    assert 0 in codes and 1 in codes


def random_edit(rng: random.Random) -> tuple[str, tuple[str, int, int, Any]]:
    """(part of the engine, what changes in it)."""
    places = rng.randrange(1 << 20), rng.randrange(1 << 20)
    return rng.choice(PARTS), (rng.choice(ACTIONS), *places, rng.choice(VALUES))
