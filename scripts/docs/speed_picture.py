"""The README's picture of speed: docs/images/speed.svg, from docs/performance/*.jsonl.

    python -m scripts.docs.speed_picture [--check]

--check writes nothing and ends with 1 where the committed picture is not what the rows give.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURE = REPOSITORY / "docs/images/speed.svg"
# TensorRT-LLM 0.15 on one H200, Llama-3.3-70B FP8, draft length 10: NVIDIA's published figures.
PUBLISHED = {"plain": 51.14, "draft": 191.74}
WIDTH, LEFT, BAR, GAP, GROUP = 760, 262, 22, 5, 62
STYLE = """
text { font: 13px system-ui, sans-serif; fill: #24292f }
.note { font-size: 12px; fill: #57606a } .title { font-weight: 600 }
.ours { fill: #2da44e } .theirs { fill: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .note { fill: #9198a1 }
  .ours { fill: #3fb950 } .theirs { fill: #656c76 }
}
"""


@dataclass(frozen=True)
class Pair:
    """Two systems under the same load, tok/s."""

    title: str
    other: str
    other_speed: float
    our_speed: float


def rows(name: str) -> list[dict[str, Any]]:
    """The measured rows of a file under docs/performance."""
    text = (REPOSITORY / f"docs/performance/{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def read_pairs() -> list[Pair]:
    """What the picture shows. Against TensorRT-LLM the pair counts at the number of tokens per
    round that its acceptance implies, as NVIDIA's figure does."""
    h200 = {row["name"]: row for row in rows("h200")}
    expected = re.search(r"a round ([\d.]+) tok/s", h200["pair-70b+1b"]["note"])
    assert expected is not None, "the pair's row has no expected speed"
    compared = [row for row in rows("vllm") if "70b" in row["command"] and "name" in row]
    vllm = {row["name"]: row["value"] for row in compared}
    trt = "TensorRT-LLM 0.15"
    return [
        Pair("70B", trt, PUBLISHED["plain"], h200["speed-70b"]["value"]),
        Pair("70B + 1B draft", trt, PUBLISHED["draft"], float(expected[1])),
        Pair("70B", "vLLM 0.25.1", vllm["one at a time: vllm"], vllm["one at a time: llmctl"]),
        Pair(
            "70B + 1B draft",
            "vLLM 0.25.1",
            vllm["with draft, one at a time: vllm"],
            vllm["with draft, one at a time: llmctl"],
        ),
    ]


def draw(pairs: list[Pair]) -> str:
    """The picture as SVG; light or dark as the reader's system is."""
    scale = (WIDTH - LEFT - 70) / max(max(pair.our_speed, pair.other_speed) for pair in pairs)
    height = 34 + GROUP * len(pairs) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        "<title>Tokens per second of llmctl, TensorRT-LLM and vLLM on one H200</title>",
        f"<style>{STYLE}</style>",
        '<text class="title" x="0" y="16">Llama-3.3-70B FP8, one H200, batch 1: tokens per '
        "second</text>",
    ]
    for index, pair in enumerate(pairs):
        top = 34 + index * GROUP
        parts.append(f'<text x="0" y="{top + 30}">{pair.title}</text>')
        bars = ((pair.other, pair.other_speed, "theirs"), ("llmctl", pair.our_speed, "ours"))
        for line, (name, speed, kind) in enumerate(bars):
            y = top + line * (BAR + GAP)
            width = speed * scale
            parts += [
                f'<text x="{LEFT - 8}" y="{y + 16}" text-anchor="end">{name}</text>',
                f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" '
                'rx="2"/>',
                f'<text x="{LEFT + width + 6:.1f}" y="{y + 16}">{speed:.0f}</text>',
            ]
    parts.append(
        f'<text class="note" x="0" y="{height - 8}">TensorRT-LLM as NVIDIA published it; vLLM on '
        "the same machine, 500 in, 200 out. 10 drafts; 6.1 tokens per round.</text>"
    )
    return "\n".join([*parts, "</svg>", ""])


def main() -> int:
    """Write the picture, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    drawn = draw(read_pairs())
    if parser.parse_args().check:
        return int(not PICTURE.exists() or PICTURE.read_text() != drawn)
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn)
    return 0


if __name__ == "__main__":
    sys.exit(main())
