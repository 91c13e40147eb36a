"""The demo pair as engines, and running requests through them, for the end-to-end tests."""

from __future__ import annotations

import fcntl
import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from llmctl.runtime.api.executor import Executor
from llmctl.runtime.drafting.draft_engine.method import DraftEngine
from llmctl.runtime.drafting.medusa.method import Medusa
from llmctl.runtime.drafting.method import DraftMethod
from llmctl.runtime.drafting.ngram.method import NgramLookup
from llmctl.runtime.drafting.plain.method import PlainDecoding
from llmctl.runtime.open import EngineOptions, OpenEngines, check_engines
from llmctl.runtime.request import Request, SamplingConfig
from support.forked_program import ForkedProgram
from support.medusa import fit_heads, save_heads

DRAFT_LEN = 4
TREE_LEN = 15
# Of the demo target's eight: four that leave its text varied, and of whose tokens the demo draft
# knows two fifths.
LAYERS = (0, 3, 5, 7)
Outputs = list[list[tuple[int, ...]]]  # per request, per returned sequence
PromptMaker = Callable[[int], list[tuple[int, ...]]]
KINDS = (  # of requests beside heads
    SamplingConfig(),
    SamplingConfig(temperature=0.8, top_k=0, seed=5),
    SamplingConfig(repetition_penalty=1.2, frequency_penalty=0.1),
    SamplingConfig(temperature=1.1, top_k=40, top_p=0.9, min_p=0.02, seed=4),
)


def llmctl(*arguments: object) -> None:
    """A command line that succeeds, as a user starts it: what uses a GPU cannot be forked."""
    command = [sys.executable, "-m", "llmctl.cli.entry", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@dataclass(frozen=True)
class DemoPair:
    """Checkpoints and engines by name: target-float32, target-bfloat16, target-fp8, draft-fp8,
    target-fp8-medusa (with Medusa heads), target-fp8-tp2, target-fp8-tp2-invariant (two ranks).

    The target is four layers of the demo target, whose step takes little more than half of its
    time; `whole` instead of `target` is all of it."""

    folder: Path
    examples: Path
    program: ForkedProgram

    def llmctl(self, *arguments: object) -> str:
        """What a command line that succeeds prints."""
        command = [*self.program.command, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def engine(self, name: str) -> Path:
        """The engine directory, built on first use."""
        with self._making(name) as path:
            if not path.exists():
                self._build(name, path)
        return path

    @contextmanager
    def _making(self, name: str) -> Iterator[Path]:
        """The path of that name, while no other worker makes it."""
        with open(self.folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield self.folder / name

    def _build(self, name: str, path: Path) -> None:
        role, dtype, *others = name.split("-")
        heads = "medusa" in others
        checkpoint = self.checkpoint(role)
        options: list[object] = ["--max-batch-size", 16, "--max-seq-len", 1024]
        if role != "draft":
            mode = "medusa" if heads else "draft_tokens_external"
            options += ["--speculative-decoding-mode", mode]
            options += ["--max-draft-len", TREE_LEN if heads else DRAFT_LEN]
            options += ["--draft-model-dir", self.medusa_heads(role)] if heads else []
        if dtype == "fp8":
            checkpoint = self.quantized(role)
        else:
            options += ["--dtype", dtype]
        options += ["--tp-size", 2] if "tp2" in others else []
        options += ["--tp-invariant"] if "invariant" in others else []
        limits = ["--checkpoint-dir", checkpoint, "--output-dir", path, *options]
        self.llmctl("build", "--backend", "cpu", *limits)

    def checkpoint(self, role: str) -> Path:
        """What an engine of that role is built from."""
        if role != "target":
            return self.examples / ("demo-target" if role == "whole" else f"demo-{role}")
        with self._making("target-checkpoint") as path:
            if not path.exists():
                keep_layers(self.examples / "demo-target", path, LAYERS)
        return path

    def quantized(self, role: str) -> Path:
        """The FP8 checkpoint with FP8 KV scales, calibrated on a little of the default text: a CPU
        without AVX-512 takes seconds for a thousand tokens."""
        with self._making(f"{role}-fp8-checkpoint") as path:
            if not path.exists():
                folders = ["--model-dir", self.checkpoint(role), "--output-dir", path]
                self.llmctl("quantize", *folders, "--qformat", "fp8", "--kv-cache-dtype", "fp8",
                            "--calib-size", 8, "--calib-max-seq-length", 64)  # fmt: skip
        return path

    def medusa_heads(self, role: str) -> Path:
        """Four heads of a target that know a little of the held-out text."""
        from tokenizers import Tokenizer

        with self._making(f"{role}-medusa-heads") as path:
            if not path.exists():
                checkpoint = self.checkpoint(role)
                tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
                text = (self.examples / "heldout.txt").read_text()
                ids = tokenizer.encode(text, add_special_tokens=False).ids[:4096]
                save_heads(path, fit_heads(float_target(checkpoint), ids, 4, 4096))
        return path

    @contextmanager
    def executor(self, target: str, draft: str | None = None, **options: Any) -> Iterator[Executor]:
        """A running executor of the named engines."""
        method: DraftMethod = PlainDecoding()
        if draft == "ngram":
            method = NgramLookup(DRAFT_LEN, 3)
        elif draft == "medusa":
            method = Medusa(draft_len=TREE_LEN)
        elif draft is not None:
            method = DraftEngine(self.engine(draft), DRAFT_LEN)
        engine_options = EngineOptions(self.engine(target), method, **options)
        with OpenEngines(check_engines(engine_options)).executor() as executor:
            yield executor


def cancel_some(
    executor: Executor, requests: list[Request], plain: Outputs, draw: random.Random
) -> None:
    """Cancel a third of the requests while they run; the others write the tokens of `plain`."""
    ids = executor.enqueue_requests(requests)
    waiting = draw.sample(ids, len(ids) // 3)
    results, cancelled, open_ids = {}, set(), set(ids)
    while open_ids:
        for response in executor.await_responses():
            assert response.result is not None, response.error
            if response.result.is_final:
                results[response.request_id] = response.result.output_token_ids
                open_ids.discard(response.request_id)
        for _ in range(min(draw.randrange(1, 3), len(waiting))):
            request_id = waiting.pop()
            cancelled.add(request_id)
            executor.cancel_request(request_id)
    for request_id, wanted in zip(ids, plain, strict=True):
        found = results[request_id]
        is_gone = request_id in cancelled and not found  # one that had ended by then is whole
        assert is_gone or found == wanted[0]


def keep_layers(checkpoint: Path, output: Path, layers: Sequence[int]) -> None:
    """Write a checkpoint that has only these of the layers."""
    shutil.copytree(checkpoint, output)
    (weights, config) = (output / name for name in ("model.safetensors", "config.json"))
    names = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(layers)}
    kept = {}
    for name, tensor in load_file(weights).items():
        found = re.match(r"model\.layers\.\d+\.", name)
        if found is None:
            kept[name] = tensor
        elif found[0] in names:
            kept[names[found[0]] + name[found.end() :]] = tensor
    save_file(kept, weights, {"format": "pt"})
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": len(layers)})
    )


def float_target(checkpoint: Path) -> Any:
    """A target as transformers has it, in float32."""
    from transformers import AutoModelForCausalLM  # seconds that other tests need not wait

    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def known_texts(requests: list[Request], plain: Outputs) -> list[tuple[list[int], list[int]]]:
    """Prompts, and the first output of each."""
    return [
        (list(request.input_token_ids), list(output[0]))
        for request, output in zip(requests, plain, strict=True)
    ]


def run_all(executor: Executor, requests: list[Request]) -> Outputs:
    """Outputs of every request, per returned sequence, all enqueued together."""
    ids = executor.enqueue_requests(requests)
    outputs: dict[int, list[tuple[int, ...]]] = {request_id: [] for request_id in ids}
    open_ids = set(ids)
    while open_ids:
        for response in executor.await_responses():
            assert response.result is not None, response.error
            outputs[response.request_id].append(response.result.output_token_ids)
            if response.result.is_final:
                open_ids.discard(response.request_id)
    return [sorted(outputs[request_id]) for request_id in ids]
