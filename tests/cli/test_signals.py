"""Ctrl-C, SIGTERM and SIGHUP to real processes: the exit code, and nothing left behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SIGNALS = pytest.mark.parametrize(
    "number, code",
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)],
    ids=["SIGINT", "SIGTERM", "SIGHUP"],
)


def signal_after(words, line: str, number: signal.Signals) -> tuple[int, str, str]:
    """Start the program, send the signal once stderr shows `line`; exit code, stdout, stderr."""
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            seen = ""
            while line not in seen:
                read = process.stderr.readline()
                assert read, f"the program ended before it printed {line!r}: {seen}"
                seen += read
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    return process.returncode, out, seen + err


@SIGNALS
def test_a_run_ends_at_once_and_writes_no_file(program, engines, tmp_path, number, code):
    words = [*program, "run", "--engine-dir", str(engines.target), "--max-output-len", "500"]
    words += ["--end-id", "-1", "--num-return-sequences", "500", "--temperature", "2"]
    words += ["--input-text", "x =", "--output-csv", str(tmp_path / "x.csv")]
    found, out, err = signal_after(words, "KV cache", number)
    assert found == code and "Traceback" not in err
    assert out == "" and list(tmp_path.iterdir()) == []


def write_large_checkpoint(folder: Path) -> Path:
    """A one-layer Llama of zeros, 0.5 GB long and holding no disk blocks."""
    hidden, vocab, rows = 1024, 256_000, 64
    shapes = {
        "model.embed_tokens.weight": [vocab, hidden],
        "model.norm.weight": [hidden],
        "model.layers.0.input_layernorm.weight": [hidden],
        "model.layers.0.post_attention_layernorm.weight": [hidden],
        **{
            f"model.layers.0.self_attn.{name}_proj.weight": [hidden, hidden]
            for name in ("q", "k", "v", "o")
        },
        "model.layers.0.mlp.gate_proj.weight": [rows, hidden],
        "model.layers.0.mlp.up_proj.weight": [rows, hidden],
        "model.layers.0.mlp.down_proj.weight": [hidden, rows],
    }
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": rows,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@SIGNALS
def test_a_build_leaves_nothing_behind(program, tmp_path, number, code):
    checkpoint = write_large_checkpoint(tmp_path / "checkpoint")
    words = [*program, "build", "--checkpoint-dir", str(checkpoint)]
    found, out, err = signal_after(
        [*words, "--output-dir", str(tmp_path / "engine")], "backend: cpu", number
    )
    assert found == code and "Traceback" not in err, err
    assert out == "" and [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_quantization_leaves_nothing_behind(program, engines, tmp_path):
    """Of one signal, since imports take five seconds: both are exceptions of the main thread."""
    words = [*program, "quantize", "--model-dir", str(engines.target_checkpoint)]
    words += ["--output-dir", str(tmp_path / "q"), "--calib-size", "512"]
    found, out, err = signal_after(words, "needs about", signal.SIGINT)
    assert found == 130 and "Traceback" not in err, err
    assert out == "" and list(tmp_path.iterdir()) == []


@SIGNALS
def test_a_signal_during_the_first_imports_ends_quietly(number, code):
    script = (
        "import os, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'llmctl.cli.main':\n"
        f"            os.kill(os.getpid(), {int(number)})\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "from llmctl.cli.entry import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")
