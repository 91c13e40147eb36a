"""Steps of few tokens under each choice that a rule or a tactic makes for them.

    python -m scripts.bench.steps 70b 8b [--tokens 1,4,11] [--contexts 300,1000,1400,3000]
    python -m scripts.bench.steps 70b --tokens 11 --try gate_up_proj=n16r1c2s7k0g0f4

Models of these shapes, of 20 layers at most, get random weights; every operator is a launch of its
own. Prints the least ms of a step in a CUDA graph (at its power limit a GPU lowers its clock, which
moves medians of short series) beside what a plain read of its bytes takes: without attention, with
each variant of verification.cu, with what serves without it, and what that attention costs a layer.
--try instead times a product's variant against its tactic's. Ends with 1 where logits differ, which
must not happen.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from statistics import median
from unittest.mock import patch

import torch

from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.plugins.ops.packed_linear.tactics import tactic_of
from llmctl.plugins.ops.paged_attention import kernel
from llmctl.plugins.ops.paged_attention import ways as attention
from llmctl.plugins.ops.paged_attention.generation.generation import choose_cut
from llmctl.plugins.ops.paged_attention.verification import verification
from llmctl.plugins.ops.paged_attention.verification.verification import Variant
from scripts.bench.layers_support import Model
from scripts.bench.rows import weight_bytes
from scripts.models.planted_shapes import SHAPES

MOST_LAYERS = 20


class Steps:
    """Steps of one model."""

    def __init__(self, name: str, bandwidth: float) -> None:
        shape = SHAPES[name]
        self.name, self.bandwidth = name, bandwidth
        self.layers = min(shape.layers, MOST_LAYERS)
        self.model = Model(replace(shape, layers=self.layers))
        self.model.use(one_launch=False)
        self.differs = False

    def time(self, context: int, tokens: int) -> float:
        """The least milliseconds under the choices of the moment."""
        return min(self.model.milliseconds(context, one_launch=False, tokens=tokens))

    def told(self, what: str, ms: float, context: int, logits: torch.Tensor | None) -> str:
        """What a time is of the read limit, and whether the logits are those wanted."""
        model = self.model
        num_bytes = weight_bytes(model.plan) + context * model.cache.numel() // model.context
        share = num_bytes / self.bandwidth / 1e9 / ms
        same = logits is None or torch.equal(logits, model.logits[:1])
        self.differs |= not same
        return f"  {what}: {ms:.4f} ms, {share:.1%} of a read{'' if same else ', LOGITS DIFFER'}"

    def attention(self, context: int, tokens: int) -> None:
        """Every kernel that can attend to a step."""
        call = next(call for call in self.model.calls if call.op == "paged_attention")
        limits = self.model.program.limits
        print(f"{self.name}, {tokens} tokens at {context}")
        with patch.object(kernel, "launches", lambda *_: []):
            without = self.time(context, tokens)
        print(self.told("without attention", without, context, None))
        ways: list[Variant | None] = [None]
        for variant in verification.VARIANTS:
            groups = verification.count_groups(variant, call, 1, tokens)
            if verification.fits(variant, call, limits):
                ways += [variant] * (variant.splits * groups <= limits.num_sms)
        logits = None
        for way in ways:
            with patch.object(attention, "choose_variant", lambda *_, way=way: way):
                cut = choose_cut if way is None else lambda *_: None
                with patch.object(attention, "choose_cut", cut):
                    ms = self.time(context, tokens)
            us = (ms - without) / self.layers * 1e3
            line = self.told(str(way or "the others"), ms, context, logits)
            print(f"{line}, {us:.2f} us a layer", flush=True)
            if logits is None:
                logits = self.model.logits[:1].clone()

    def product(self, context: int, tokens: int, name: str, variant: str) -> None:
        """A variant of one product against what its tactic says."""
        before = self.time(context, tokens)
        logits = self.model.logits[:1].clone()
        own = [call for call in self.model.calls if call.name.endswith(name)]
        stored = [call.tactic for call in own]
        for call in own:
            tactic = re.sub(r"^", f"{tokens}:{variant};", tactic_of(call))
            object.__setattr__(call, "tactic", tactic)  # frozen for everybody else
        after = self.time(context, tokens)
        print(self.told("tactic", before, context, None))
        print(self.told(f"{name} {variant}", after, context, logits), flush=True)
        for call, tactic in zip(own, stored, strict=True):
            object.__setattr__(call, "tactic", tactic)


def main() -> None:
    """Time model after model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    parser.add_argument("--tokens", default="1,4,11")
    parser.add_argument("--contexts", default="300,1000,1400,3000")
    parser.add_argument(
        "--try", dest="tried", help="PRODUCT=VARIANT, as gate_up_proj=n16r1c4s5k0g0f2"
    )
    arguments = parser.parse_args()
    bandwidth = median(read_bandwidth())
    print(f"a plain read: {bandwidth:.3f} TB/s")
    differs = False
    for name in arguments.shapes:
        steps = Steps(name, bandwidth)
        for context in map(int, arguments.contexts.split(",")):
            for tokens in map(int, arguments.tokens.split(",")):
                if arguments.tried:
                    steps.product(context, tokens, *arguments.tried.split("=", 1))
                else:
                    steps.attention(context, tokens)
        differs |= steps.differs
        del steps
        torch.cuda.empty_cache()
    sys.exit(differs)


if __name__ == "__main__":
    main()
