"""Run one prompt with and without the draft engine and print text, acceptance and speed.

    python scripts/compare_draft.py LLMCTL OUTPUT_DIR DRAFT_LEN    (the end of scripts/quickstart)

Each way runs a few times in processes of its own, in turns; the best time of each counts.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from typing import Any

PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""\n'
NUM_RUNS = 3


def run(command: list[str]) -> dict[str, Any]:
    """The JSON object that a run prints. Exits with the run's own error and code."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def main() -> None:
    llmctl, output, draft_len = sys.argv[1:]
    base = ["run", "--engine_dir", f"{output}/target-engine", "--max_output_len", "256"]
    base += ["--input_text", PROMPT, "--json", "--log_level", "warning"]
    draft = ["--draft_engine", f"{output}/draft-engine", "--draft_len", draft_len]
    print(f"\n$ llmctl {shlex.join(base)}\n$ llmctl {shlex.join([*base, *draft])}", file=sys.stderr)
    plain, drafted = [], []
    for _ in range(NUM_RUNS):
        plain.append(run([llmctl, *base]))
        drafted.append(run([llmctl, *base, *draft]))

    texts = {item["outputs"][0]["text"] for item in plain + drafted}
    speeds = [max(item["stats"]["tokens_per_s"] for item in runs) for runs in (plain, drafted)]
    speculation = drafted[0]["stats"]["speculation"]
    print(f"\n{PROMPT}{plain[0]['outputs'][0]['text']}\n")
    print(f"without draft  {speeds[0]:8.1f} tok/s")
    print(f"with draft     {speeds[1]:8.1f} tok/s  ({speeds[1] / speeds[0]:.2f} x)")
    print(
        f"acceptance     {speculation['acceptance_rate']:8.3f}  "
        f"({speculation['tokens_per_round']:.2f} tokens a round, draft_len {draft_len})"
    )
    print(f"output         {'identical' if len(texts) == 1 else 'DIFFERENT'}")
    if len(texts) != 1:
        sys.exit(1)


if __name__ == "__main__":
    main()
