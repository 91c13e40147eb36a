"""A tiny tokenizer, random checkpoints and engines; and the program itself, in process or not."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.main import replace_run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmctl.cli.main import execute

TEXT = Path(__file__).resolve().parents[2] / "examples/heldout.txt"
BOS, EOS = "<|begin|>", "<|end|>"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def write_tokenizer(folder: Path, **config: object) -> Path:
    """A byte-level BPE of 1,000 tokens, trained on a fixed text."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT.read_text()[:14_000]], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    base = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (folder / "tokenizer_config.json").write_text(json.dumps(base | config))
    return folder


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Path]:
    """write_tokenizer: a folder, and fields of tokenizer_config.json."""
    return write_tokenizer


@pytest.fixture(scope="session")
def chat_template() -> str:
    """A chat template with roles, special tokens and a generation prompt."""
    return CHAT_TEMPLATE


@dataclass(frozen=True)
class Done:
    """What one command line left behind."""

    code: int
    out: str
    err: str


@pytest.fixture
def llmctl(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command line in this process."""

    def run(*argv: object) -> Done:
        capsys.readouterr()
        code = execute([str(word) for word in argv])
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def program() -> list[str]:
    """The program as a user starts it; `forked_program` is it without the seconds of imports."""
    return [sys.executable, "-m", "llmctl.cli.entry"]


@dataclass(frozen=True)
class Engines:
    """A target that verifies up to 4 drafts, a draft, and what they were built from."""

    target: Path
    draft: Path
    target_checkpoint: Path
    draft_checkpoint: Path


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Engines:
    """Two random Llamas with one tokenizer. The draft is the target with another seed."""
    folder = tmp_path_factory.mktemp("engines")
    tokenizer = write_tokenizer(folder / "tokenizer", chat_template=CHAT_TEMPLATE)
    script = runpy.run_path(str(repository / "scripts/models/make_random_checkpoint.py"))
    made = Engines(folder / "target", folder / "draft", folder / "target-hf", folder / "draft-hf")
    for seed, checkpoint in enumerate((made.target_checkpoint, made.draft_checkpoint)):
        script["write_checkpoint"](checkpoint, "tiny", "none", tokenizer, seed)
    build_engines(made)
    return made


def build_engines(made: Engines, *options: str) -> None:
    """Both engines of their checkpoints."""
    pairs = ((made.target_checkpoint, made.target), (made.draft_checkpoint, made.draft))
    for checkpoint, engine in pairs:
        limits = ["--max-seq-len", "512", "--max-batch-size", "8", "--max-num-tokens", "128"]
        if engine == made.target:
            limits += ["--speculative_decoding_mode", "draft_tokens_external"]
            limits += ["--max_draft_len", "4"]
        build = ["build", "--checkpoint-dir", str(checkpoint), "--output-dir", str(engine)]
        assert execute([*build, *limits, *options]) == 0


@pytest.fixture(scope="session")
def rank_engines(engines: Engines, tmp_path_factory: pytest.TempPathFactory) -> Engines:
    """The same two models as engines of two ranks of the cpu."""
    folder = tmp_path_factory.mktemp("rank_engines")
    made = replace(engines, target=folder / "target", draft=folder / "draft")
    build_engines(made, "--backend", "cpu", "--tp-size", "2")
    return made


@pytest.fixture(scope="session")
def run_process(forked_program) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a command line as a process and wait for it."""

    def run(*argv: object) -> subprocess.CompletedProcess[str]:
        words = [*forked_program.command, *map(str, argv)]
        return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)

    return run


@pytest.fixture
def bench(llmctl, engines):
    """A benchmark of the target engine: the JSON object it prints, and all it left behind."""

    def call(command: str, *argv: object, code: int = 0) -> tuple[dict[str, Any], Done]:
        done = llmctl("bench", command, "--engine-dir", engines.target, *argv)
        assert done.code == code, done
        assert done.out.count("\n") == 1, "stdout is one line"
        return json.loads(done.out), done

    return call


@pytest.fixture
def drafted(engines) -> list[object]:
    """Options that make the draft engine draft 3 tokens a round."""
    return ["--draft-engine", engines.draft, "--draft-len", 3]


@pytest.fixture
def run(llmctl, engines):
    def call(*argv, engine=None, tokens=12):
        return llmctl(
            "run", "--engine_dir", engine or engines.target, "--max_output_len", tokens, *argv
        )

    return call


@pytest.fixture
def outputs(run):
    """The outputs of a run as JSON objects."""

    def call(*argv, **options):
        done = run(*argv, "--json", "--log_level", "error", **options)
        assert done.code == 0, done
        return json.loads(done.out)["outputs"]

    return call


@pytest.fixture
def command_that_raises(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Replace `llmctl run` by a command without options that raises."""

    def install(error: BaseException) -> None:
        def command() -> None:
            raise error

        replace_run(monkeypatch, command)

    return install
