"""Training end to end with toy sizes, through the command a user types."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

FILES = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture
def corpus(tmp_path):
    """Modules of made-up functions; names chosen so that three are held out."""
    from scripts.demo.corpus import is_held_out

    folder = tmp_path / "corpus"
    folder.mkdir()
    names = [f"module_{n}.py" for n in range(300)]
    held = [name for name in names if is_held_out(name)][:3]
    for name in [*[name for name in names if name not in held][:12], *held]:
        stem = name.removesuffix(".py")
        body = "".join(
            f"def {stem}_function_{n}(first, second):\n"
            f'    """Return the sum of {stem} and {n}."""\n'
            + "".join(f"    first += second * {k}\n" for k in range(9))
            + "    return first\n\n\n"
            for n in range(6)
        )
        (folder / name).write_text(body)
    return folder


def run(*command):
    return subprocess.run(
        [sys.executable, "-m", *map(str, command)], capture_output=True, text=True, timeout=120
    )


def test_one_command_trains_a_pair_that_transformers_loads(tmp_path, corpus):
    from scripts.demo.model import read_model

    output = tmp_path / "pair"
    result = run("scripts.demo.train", "--smoke", "--corpus", corpus, "--output", output)
    assert result.returncode == 0, result.stderr
    metrics = json.loads((output / "metrics.json").read_text())
    assert metrics["target_history"][-1][1] < metrics["target_history"][0][1]
    assert 0 <= metrics["acceptance"]["acceptance"] <= 1
    tokenizers = {
        (output / name / "tokenizer.json").read_bytes() for name in ("demo-target", "demo-draft")
    }
    assert len(tokenizers) == 1
    for name in ("demo-target", "demo-draft"):
        folder = output / name
        assert sorted(path.name for path in folder.iterdir()) == FILES
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        ids = AutoTokenizer.from_pretrained(folder)("def f(x):\n    return x", return_tensors="pt")
        with torch.no_grad():
            wanted = model(input_ids=ids.input_ids).logits
            ours = read_model(folder, torch.device("cpu"))(ids.input_ids)
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


def test_sampling_with_a_cache_equals_recomputing_everything():
    from scripts.demo.generation import generate
    from scripts.demo.model import Llama
    from scripts.demo.recipe import SMOKE

    torch.manual_seed(0)
    model = Llama(SMOKE.target).eval()
    ids = torch.randint(3, SMOKE.target.vocab_size, (2, 9))
    written = generate(model, ids, 12, temperature=0.0)
    for _ in range(12):
        with torch.no_grad():
            ids = torch.cat([ids, model(ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(written, ids[:, 9:])


def test_text_in_any_script_survives_the_tokenizer():
    from scripts.demo.tokenizer import BOS_ID, train_tokenizer

    tokenizer = train_tokenizer(["def f(x):\n    return x\n"] * 3, 300)
    text = "class Ä:\n\t\tß = '日本 \u2028 🙂'\r\n\n\n    def _f__(x): 12345  \n"
    encoding = tokenizer.encode(text)
    assert encoding.ids[0] == BOS_ID
    assert tokenizer.decode(encoding.ids) == text


def test_a_prompt_may_end_after_a_line_break_or_an_indentation():
    from scripts.demo.tokenizer import train_tokenizer

    text = "def f(x):\n    if x:\n        return x\n\n    return 0\n"
    tokenizer = train_tokenizer([text] * 3, 300)
    whole = tokenizer.encode(text).ids
    for at in (10, 14, 20, 28, 37, 38, 42):
        prompt = tokenizer.encode(text[:at]).ids
        assert whole[: len(prompt)] == prompt, text[:at]


def test_a_corpus_too_small_for_one_batch_is_refused(tmp_path):
    import numpy as np

    from scripts.demo.batches import epochs

    with pytest.raises(SystemExit, match="100 tokens; batches of 4 rows of 64 need 320"):
        next(epochs(np.arange(100, dtype=np.int32), 64, 4, seed=0))
