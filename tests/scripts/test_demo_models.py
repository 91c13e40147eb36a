"""The committed pair in examples/."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PAIR = ("demo-target", "demo-draft")


@pytest.fixture(scope="module")
def metrics():
    return json.loads((EXAMPLES / "metrics.json").read_text())


def load(name):
    return AutoModelForCausalLM.from_pretrained(EXAMPLES / name, dtype=torch.float32).eval()


def test_both_models_load_with_the_stated_sizes(metrics):
    for name, low, high in (("demo-target", 12e6, 15e6), ("demo-draft", 0.9e6, 1.4e6)):
        model = load(name)
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        assert num_parameters == metrics[f"{name.removeprefix('demo-')}_parameters"]
        assert low <= num_parameters <= high
        assert model.config.max_position_embeddings == 2048


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_the_tokenizer_files_are_equal_byte_for_byte(name):
    digests = {hashlib.sha256((EXAMPLES / model / name).read_bytes()).digest() for model in PAIR}
    assert len(digests) == 1


def test_the_folder_fits_its_share_of_the_repository():
    """The pair and what is beside it, and the heads of each kind."""
    sizes = {path: path.stat().st_size for path in EXAMPLES.rglob("*") if path.is_file()}
    shares = {"eagle": 4_000_000, "medusa": 3_000_000, "redrafter": 3_000_000}
    for kind, most in shares.items():
        own = [path for path in sizes if path.parent.name == f"demo-{kind}"]
        assert 0 < sum(sizes.pop(path) for path in own) <= most, kind
    assert sum(sizes.values()) <= 29 * 2**20
    assert (EXAMPLES / "heldout.txt").stat().st_size <= 150_000


def test_the_held_out_text_holds_held_out_files_only():
    from scripts.demo.corpus import is_held_out, read_sample

    documents = read_sample(EXAMPLES / "heldout.txt")
    assert len(documents) >= 10
    assert all(is_held_out(document.name) for document in documents)


def test_a_base_model_has_no_chat_template():
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "demo-target")
    assert tokenizer.chat_template is None
    ids = tokenizer("import os\n").input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == "import os\n"


def test_the_target_completes_an_initializer():
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLES / "demo-target")
    prompt = "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self."
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    written = load("demo-target").generate(ids, max_new_tokens=4, do_sample=False)
    assert tokenizer.decode(written[0], skip_special_tokens=True).startswith(prompt + "y = y")


def test_acceptance_and_perplexity_are_near_the_card_on_the_committed_text(metrics):
    from tokenizers import Tokenizer

    from scripts.demo.corpus import read_sample
    from scripts.demo.evaluation import function_prompts, greedy_acceptance, perplexity
    from scripts.demo.model import read_model

    cpu = torch.device("cpu")
    tokenizer = Tokenizer.from_file(str(EXAMPLES / "demo-target" / "tokenizer.json"))
    documents = read_sample(EXAMPLES / "heldout.txt")
    target, draft = (read_model(EXAMPLES / name, cpu) for name in PAIR)
    some = documents[1:2]
    assert perplexity(target, tokenizer, some, cpu)["perplexity"] < 10
    prompts = function_prompts(tokenizer, documents, 128, 8)
    measured = greedy_acceptance(target, draft, prompts, cpu, 4, 16)
    assert metrics["acceptance"]["acceptance"] >= 0.55
    assert measured.acceptance >= 0.4  # 8 prompts of 16 tokens scatter
