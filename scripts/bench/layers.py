"""Decoder layers in one launch against the launches of their operators: bits, and time of a step.

    python -m scripts.bench.layers 1b 3b 8b [--qformat w4a8_mxfp4_fp8] [--contexts 1,64,1000]
        [--tokens 2] [--times 1000,2000,4000] [--pace 3_3_5_8_1,5_3_7_0_0]
        [--own-binary 1024,2048] [--output plugins/fused/decoder_layers/tactics.json]
    python -m scripts.bench.layers 1b --contexts 2,4097,20000 --times 8000,16000,32000

Models of these shapes get random weights. Reports for each context whether logits and KV cache have
the same bits either way, and the time of a step with one token in a CUDA graph of ten beside what a
plain read of the same bytes takes; ends with 1 where bits differ. --pace: first chooses how weights
are loaded (`Pace`), by the time at the first context. --own-binary: lengths that steps are padded
to and that get a binary compiled for contexts up to there; by default those of tactics.json, and ""
for none. --output stores all that and the times, each for all contexts that are padded to the same
length; by them `llmctl build` decides. Contexts longer than 4,096 tokens have a binary of their
own, so --times are either up to there or longer; what is stored for the others remains.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import torch

from llmctl.builder.config import BuildRequest
from llmctl.plugins.backends.cuda.read_rate import read_bandwidth
from llmctl.plugins.fused.decoder_layers.kernel import TOKENS
from llmctl.plugins.fused.decoder_layers.tactics import SHORT, Pace, Tactic, divided, shape_key
from llmctl.plugins.schemes.table import FP8, quantized_schemes
from llmctl.quantize.format import find_scheme
from llmctl.runtime.engines.graphs import kv_bucket
from scripts.bench.layers_support import CONTEXT, Model
from scripts.bench.rows import provenance, replace, weight_bytes
from scripts.models.planted_shapes import SHAPES

ROUNDS = 3  # of choosing


def pace_of(text: str) -> list[Pace]:
    """The candidates of an option."""
    return [Pace(*map(int, each.split("_"))) for each in text.split(",")]


def lengths_of(text: str) -> list[int]:
    """Of an option, the shortest first."""
    return sorted(int(each) for each in text.split(",") if each)


def give_own_binaries(model: Model, contexts: Sequence[int], own: Sequence[int]) -> None:
    """One launch for steps of all these contexts: with a binary for those padded to each of `own`,
    and one for the others."""
    padded = sorted({kv_bucket(context, model.program.limits) for context in contexts})
    if not set(own) <= set(padded):
        raise SystemExit(f"--own-binary is {own}; --times are padded to {padded}")
    gains = tuple((most, True) for most in padded)
    model.set_tactics(divided(gains, model.chains[0].tactic.pace, own))


def give_long_binary(model: Model, times: Sequence[int]) -> None:
    """One launch for steps of all contexts, by the binary for those longer than SHORT."""
    padded = sorted({kv_bucket(context, model.program.limits) for context in times})
    (tactic, *_) = (each.tactic for each in model.chains)
    gains = ((SHORT, True), *((most, True) for most in padded))
    model.set_tactics([Tactic(gains, tactic.pace._replace(held=0))])


def choose_pace(model: Model, context: int, tokens: int, candidates: Sequence[Pace]) -> None:
    """Bring weights as is fastest, by the least median of rounds, which take all in turn."""
    times: dict[Pace, list[float]] = {each: [] for each in candidates}
    for _ in range(ROUNDS):
        for each in candidates:
            model.set_pace(each)
            times[each].append(median(model.milliseconds(context, True, tokens)))
    for each, its in times.items():
        print(f"{each}: {' '.join(f'{x:.4f}' for x in its)} ms")
    model.set_pace(min(times, key=lambda each: min(times[each])))


def main() -> None:
    """Compare model after model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("shapes", nargs="+", choices=SHAPES)
    qformats = [scheme.qformat for scheme in quantized_schemes()]
    parser.add_argument("--qformat", choices=qformats, default="fp8")
    parser.add_argument("--tokens", type=int, choices=TOKENS, default=1, help="of a step")
    parser.add_argument("--contexts", default="1,2,63,64,65,700,1000,1024,1025,1999,3001,4095")
    parser.add_argument("--times", default="1000,2000,4000")
    parser.add_argument("--pace", type=pace_of, default=[])
    parser.add_argument("--own-binary", type=lengths_of)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    tokens = arguments.tokens
    checked, timed = lengths_of(arguments.contexts), lengths_of(arguments.times)
    is_long = timed[0] > SHORT
    if not is_long and timed[-1] > SHORT:
        parser.error(f"--times are either up to {SHORT} or longer")
    longest = 1 << (max(checked[-1], timed[-1], CONTEXT) - 1).bit_length()
    request = BuildRequest(max_batch_size=4, max_seq_len=longest)
    stored, chosen, apart = {}, {}, {}
    failed = False
    bandwidth = median(read_bandwidth())
    print(f"a plain read: {bandwidth:.3f} TB/s")
    for name in arguments.shapes:
        model = Model(name, tokens, request, qformat=arguments.qformat)
        assert model.chains, f"{name}: its layers are none that one launch can take"
        if arguments.own_binary is not None:
            give_own_binaries(model, timed, arguments.own_binary)
        if is_long:
            give_long_binary(model, timed)
            assert model.chains, f"{name}: its layers have no launch for long contexts"
        if arguments.pace:
            choose_pace(model, timed[0], tokens, arguments.pace)
        tactic = model.chains[0].tactic
        different = [
            context
            for context in checked
            if context >= tokens and not model.has_same_bits(context, tokens)
        ]
        spread = float(model.logits[0].std())
        verdict = f"bits differ at {different}" if different else "same bits"
        layers = model.chains[0].layers
        print(f"{name}: {len(layers)} layers, {tactic.pace}, logits of {spread:.1f}: {verdict}")
        failed |= bool(different)
        times = {}
        for context in timed:
            many, one = (model.milliseconds(context, way, tokens) for way in (False, True))
            times[str(kv_bucket(context, model.program.limits))] = {
                "launches": round(median(many), 4),
                "one_launch": round(median(one), 4),
            }
            num_bytes = weight_bytes(model.plan) + context * model.cache.numel() // model.context
            floor = num_bytes / bandwidth / 1e9
            told = ", ".join(
                f"{what} {x[0]:.4f} {median(x):.4f} {x[-1]:.4f} ({floor / median(x):.1%} of a read)"
                for what, x in (("launches", many), ("one launch", one))
            )
            print(f"{name} at {context}: least, median, most ms a step: {told}", flush=True)
        stored[shape_key(layers[0], tokens)] = times
        chosen[shape_key(layers[0], tokens) + ".long" * is_long] = tactic.pace
        if arguments.own_binary is not None:
            apart[shape_key(layers[0], tokens)] = arguments.own_binary
        del model, layers
        torch.cuda.empty_cache()
    if arguments.output is not None:
        found = json.loads(arguments.output.read_text()) if arguments.output.exists() else {}
        for key, its in stored.items():
            before = found.setdefault("ms", {}).get(key, {})
            kept = {most: ms for most, ms in before.items() if (int(most) > SHORT) != is_long}
            found["ms"][key] = {**kept, **its}
        found["pace"] = {**found.get("pace", {}), **chosen}
        own = {**found.get("own_binary", {}), **apart}
        found["own_binary"] = {key: lengths for key, lengths in own.items() if lengths}
        weights = find_scheme(arguments.qformat)
        of = f"_{weights.name}" * (weights is not FP8) + f"_n{tokens}" * (tokens > 1)
        of += "_long" * is_long
        found[f"measured{of}"] = provenance()
        replace(arguments.output, json.dumps(found, indent=1, sort_keys=True) + "\n")
    sys.exit(failed)


if __name__ == "__main__":
    main()
