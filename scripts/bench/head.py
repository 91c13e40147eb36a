"""Times the output projection of a step, and finds its tactic.

    python -m scripts.bench.head 70b 8b 3b 1b [--rows 1,11] [--head bf16|fp8|mxfp4] [--sweep]

Two layers of these shapes with random weights, every operator a launch of its own, and the head
over all rows: the least ms of such a step in a CUDA graph, beside what a plain read of its weights
takes. --sweep tries the head's variants, twice the best of them, and prints an entry for
packed_linear's tactics.json where one is faster by GAIN_US. Ends with 1 where logits differ,
which must not happen.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import partial
from statistics import median

import torch

from llmctl.builder.config import BuildRequest
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.plugins.schemes.table import quantized_schemes
from scripts.bench.layers_support import CONTEXT, Model
from scripts.bench.product_variants import sweep
from scripts.bench.rows import weight_bytes
from scripts.models.planted_shapes import SHAPES

LAYERS, DRAFT_LEN = 2, 16
AT = 1000  # tokens of context
QFORMATS = {"bf16": "fp8", **{s.name: s.qformat for s in quantized_schemes()}}  # of the layers


class Head:
    """The output projection of one model."""

    def __init__(self, name: str, head: str) -> None:
        request = BuildRequest(
            max_batch_size=1,
            max_seq_len=CONTEXT,
            max_draft_len=DRAFT_LEN,
            speculative_decoding_mode="draft_tokens_external",
        )
        shape = replace(SHAPES[name], layers=LAYERS)
        is_quantized = head != "bf16"
        self.model = Model(
            shape, request=request, qformat=QFORMATS[head], quantized_head=is_quantized
        )
        self.model.use(one_launch=False)
        self.call = next(call for call in self.model.calls if call.name == "lm_head")

    def time(self, rows: int) -> tuple[float, torch.Tensor]:
        """Least ms of a step, and its logits."""
        ms = min(self.model.milliseconds(AT, one_launch=False, tokens=rows, rows=rows))
        return ms, self.model.logits[:rows].clone()


def main() -> None:
    """Time head after head."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--rows", default="1,11", help="that get logits, all tokens of a step")
    parser.add_argument("--head", choices=QFORMATS, default="bf16", help="type of its weights")
    parser.add_argument("--sweep", action="store_true", help="look for better tactics")
    options = parser.parse_args()
    bandwidth = median(read_bandwidth())
    print(f"{torch.cuda.get_device_name()}: plain read {bandwidth:.3f} TB/s", flush=True)
    is_same = True
    for name in options.shapes:
        head = Head(name, options.head)
        floor = weight_bytes(head.model.plan) / bandwidth / 1e9
        for rows in map(int, options.rows.split(",")):
            ms, _ = head.time(rows)
            print(
                f"{name} {options.head} head, {rows} rows: {ms:.4f} ms, {floor / ms:.1%} of a read"
            )
            if options.sweep:
                is_same &= sweep(
                    [head.call], rows, head.model.program.limits, partial(head.time, rows)
                )
        del head
        torch.cuda.empty_cache()
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
