"""Running the program on files that nobody vouches for: what may come of it, and what may not."""

from __future__ import annotations

import io
import json
import resource
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from llmctl.cli.main import execute

TIME_LIMIT_S = 60  # a tiny build or run takes a tenth of a second, where others leave it time
MOST_MESSAGE = 1_000  # characters; whatever was found is cut
NO_ANSWERS = ("", "Bug", "OutOfMemory", "OutOfDisk")
SPARE_BYTES = 2 << 30  # of address space beside what the process has; a tiny run maps a few MB


class Hang(BaseException):
    """A command that did not end; no Exception, so that the program does not name it."""


@dataclass(frozen=True)
class Outcome:
    """How a command line ended: exit code, the error's name, what was said, seconds taken."""

    code: int
    name: str
    message: str
    fix: str
    out: str
    seconds: float


@contextmanager
def bounded() -> Iterator[None]:
    """Raise Hang after TIME_LIMIT_S; let allocations of more than SPARE_BYTES fail."""

    def stop(number: int, frame: object) -> None:
        raise Hang

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + SPARE_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def attempt(*argv: object) -> Outcome:
    """Run a command line in this process, within bounds."""
    out, err = io.StringIO(), io.StringIO()
    start = time.monotonic()
    with bounded(), redirect_stdout(out), redirect_stderr(err):
        code = execute([str(word) for word in argv])
    seconds = time.monotonic() - start
    error: dict[str, Any] = {}
    lines = out.getvalue().splitlines()
    if code and lines:
        with suppress(ValueError):
            result = json.loads(lines[-1])
            rows = result.get("outputs") or [{}]
            error = result.get("error") or rows[0].get("error") or {}
    return Outcome(
        code=code,
        name=error.get("name", ""),
        message=error.get("message", err.getvalue()),
        fix=error.get("fix", ""),
        out=out.getvalue(),
        seconds=seconds,
    )


def build(checkpoint: Path, engine: Path, *options: object) -> Outcome:
    """Build an engine of the cpu backend, in place of an earlier one."""
    shutil.rmtree(engine, ignore_errors=True)
    return attempt("build", "--backend", "cpu", "--checkpoint-dir", checkpoint, "--output-dir",
                   engine, "--json", "--log-level", "error", *options)  # fmt: skip


def run(engine: Path, *options: object) -> Outcome:
    """Two tokens of text from an engine."""
    return attempt("run", "--engine-dir", engine, "--max-output-len", 2, "--json", "--log-level",
                   "error", *options)  # fmt: skip


def require_named(outcome: Outcome, *names: str) -> None:
    """Assert a refusal by one of these names (any, if none is given) that is no failure of memory,
    of disk or of llmctl, and whose message a terminal can show."""
    assert outcome.code in (1, 2, 3, 4), outcome
    assert outcome.name in names if names else outcome.name not in NO_ANSWERS, outcome
    assert outcome.message and len(outcome.message) < MOST_MESSAGE, outcome
    (outcome.message + outcome.fix).encode()


def token_ids(outcome: Outcome) -> list[int]:
    """The first output of a run."""
    assert outcome.code == 0, outcome
    ids: list[int] = json.loads(outcome.out)["outputs"][0]["token_ids"]
    return ids


# ---- a checkpoint whose every part may be replaced ----

VOCAB, BOS, EOS = 260, "<s>", "</s>"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "tie_word_embeddings": False,
    "max_position_embeddings": 128,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "truncate": True,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
}
TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


def write_checkpoint(folder: Path) -> Path:
    """A Llama of one layer with random weights, a byte tokenizer and a chat template."""
    folder.mkdir(parents=True)
    vocab = {BOS: 0, EOS: 1}
    for character in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[character] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([BOS, EOS])
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    write(folder / "tokenizer_config.json", words | {"chat_template": TEMPLATE})
    write(folder / "config.json", CONFIG)
    write(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": [1]})
    save_file(_weights(), folder / "model.safetensors")
    return folder


def write(path: Path, document: object) -> None:
    """A JSON document, or text or bytes as they are."""
    if isinstance(document, bytes):
        path.write_bytes(document)
    else:
        text = document if isinstance(document, str) else json.dumps(document)
        path.write_text(text, encoding="utf-8", errors="surrogatepass")


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)

    def random(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    layer = {
        "input_layernorm": torch.ones(32),
        "post_attention_layernorm": torch.ones(32),
        "self_attn.q_proj": random(32, 32),
        "self_attn.k_proj": random(16, 32),
        "self_attn.v_proj": random(16, 32),
        "self_attn.o_proj": random(32, 32),
        "mlp.gate_proj": random(64, 32),
        "mlp.up_proj": random(64, 32),
        "mlp.down_proj": random(32, 64),
    }
    return {
        "model.embed_tokens.weight": random(VOCAB, 32),
        "model.norm.weight": torch.ones(32),
        "lm_head.weight": random(VOCAB, 32),
        **{f"model.layers.0.{name}.weight": tensor for name, tensor in layer.items()},
    }
