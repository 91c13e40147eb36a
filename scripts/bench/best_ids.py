"""Times the output projection of many rows of which the best ids alone are wanted.

    python -m scripts.bench.best_ids [--rows 65,120,256] [--vocab 128256] [--hidden 4096]
        [--dtype bfloat16|fp8]

Random weights. Microseconds of the product that stores logits and of argmax behind it, and of the
product that keeps the best ids and what takes them (plugins/ops/packed_linear/best.py), each beside
what a plain read of the weights takes. Ends with 1 where ids differ, which must not happen.
"""

from __future__ import annotations

import argparse
import sys
from statistics import median

import torch

from llmctl.plugins.backends.cuda.kernel_spec import Launch
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.plugins.core.calls import OpCall
from llmctl.plugins.ops.packed_linear import best
from llmctl.plugins.ops.packed_linear.prefill import prefill_launches
from llmctl.plugins.ops.sampling import kernel as sampling
from llmctl.plugins.ops.sampling.arrays import SamplingScratch
from scripts.bench.gemm_support import MAX_TOKENS, Bench


def forms_of(
    bench: Bench, call: OpCall, rows: int
) -> tuple[list[list[Launch]], list[torch.Tensor]]:
    """The launches of both ways, and where each puts its ids."""
    logits = call.outputs["out"]
    scratch = SamplingScratch.allocate(MAX_TOKENS, logits.shape[1], "cuda")
    stored, kept = (torch.zeros(rows, dtype=torch.int32, device="cuda") for _ in range(2))
    storing = prefill_launches(call, bench.env, rows)
    storing.append(sampling.argmax(logits, stored, scratch, rows))
    keeping = best.best_launches(call, bench.env, rows)
    keeping.append(best.take_launch(call, bench.env, kept, rows))
    return [storing, keeping], [stored, kept]


def main() -> None:
    """Time one number of rows after the other."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", default="65,120,256", help=f"up to {MAX_TOKENS} each")
    parser.add_argument("--vocab", type=int, default=128256, help="ids")
    parser.add_argument("--hidden", type=int, default=4096, help="columns of the weight")
    parser.add_argument("--dtype", choices=("bfloat16", "fp8"), default="bfloat16")
    options = parser.parse_args()
    bandwidth = median(read_bandwidth())
    print(f"{torch.cuda.get_device_name()}: plain read {bandwidth:.3f} TB/s", flush=True)
    bench = Bench()
    call = bench.call(
        "packed_linear", options.vocab, options.hidden, options.dtype, out=torch.float32
    )
    floor_us = call.inputs["weight"].nbytes / bandwidth / 1e6
    is_same = True
    for rows in map(int, options.rows.split(",")):
        forms, found = forms_of(bench, call, rows)
        bench.compile([launch for launches in forms for launch in launches])
        cells = [
            f"{name} {us:.1f} us, {floor_us / us:.1%} of a read"
            for name, us in zip(
                ("logits and argmax", "best ids"), map(bench.time, forms), strict=True
            )
        ]
        is_same &= torch.equal(*found)
        print(f"{rows} rows: {'; '.join(cells)}; the same ids: {torch.equal(*found)}", flush=True)
    sys.exit(not is_same)


if __name__ == "__main__":
    main()
