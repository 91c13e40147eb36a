"""Run one prompt with and without the draft engine and print text, acceptance and speed.

    python -m scripts.compare.draft LLMCTL OUTPUT_DIR DRAFT_LEN    (the end of scripts/quickstart)

Each way runs a few times in processes of its own, in turns; the best time of each counts.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from typing import Any

PROMPT = 'def read_lines(path):\n    """Return the lines of a text file."""\n'
MODES = {
    "sampled": ["--temperature", "0.7", "--random_seed", "7"],
    "greedy": [],  # small models soon repeat themselves, and repetitions are easy to draft
}
NUM_RUNS = 3


def run(command: list[str]) -> dict[str, Any]:
    """The JSON object that a run prints. Exits with the run's own error and code."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def compare(base: list[str], draft: list[str]) -> tuple[str, list[str]]:
    """(text, the lines of a table) of one command with and without the draft."""
    plain, drafted = [], []
    for _ in range(NUM_RUNS):
        plain.append(run(base))
        drafted.append(run([*base, *draft]))
    texts = [item["outputs"][0]["text"] for item in plain + drafted]
    if len(set(texts)) != 1:
        sys.exit("error: the draft changed the output")
    speeds = [max(item["stats"]["tokens_per_s"] for item in runs) for runs in (plain, drafted)]
    speculation = drafted[0]["stats"]["speculation"]
    lines = [
        f"without draft  {speeds[0]:8.1f} tok/s",
        f"with draft     {speeds[1]:8.1f} tok/s  ({speeds[1] / speeds[0]:.2f} x), same output",
        f"acceptance     {speculation['acceptance_rate']:8.3f}        "
        f"({speculation['tokens_per_round']:.2f} tokens a round)",
    ]
    return texts[0], lines


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("llmctl", help="the program")
    parser.add_argument("output", help="folder with target-engine and draft-engine")
    parser.add_argument("draft_len", type=int)
    given = parser.parse_args()
    output, draft_len = given.output, given.draft_len
    base = ["run", "--engine_dir", f"{output}/target-engine", "--max_output_len", "128"]
    base += ["--input_text", PROMPT]
    quiet = ["--json", "--log_level", "warning"]
    draft = ["--draft_engine", f"{output}/draft-engine", "--draft_len", str(draft_len)]
    for name, sampling in MODES.items():
        command = [*base, *sampling]
        for extra in ([], draft):
            print(f"\n$ llmctl {shlex.join([*command, *extra])}", file=sys.stderr)
        text, lines = compare([given.llmctl, *command, *quiet], draft)
        print(f"\n{PROMPT}{text}\n\n{name}, draft_len {draft_len}")
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
