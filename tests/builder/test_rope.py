"""Inverse frequencies of every RoPE type against transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from llmctl.builder.rope import read_rope
from llmctl.errors import CorruptFile, Unsupported

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama 3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama 3.2": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn from max_position": {"rope_type": "yarn", "factor": 4.0},
    "yarn with every number": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "truncate": False,
    },
    "yarn attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
}


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("head_size", [64, 80, 128])
def test_frequencies_equal_transformers(name: str, head_size: int) -> None:
    scaling = {**SCALINGS[name], "rope_theta": 500000.0}
    config = LlamaConfig(
        rope_parameters=dict(scaling), head_dim=head_size, max_position_embeddings=131072
    )
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rope = read_rope(
        {"rope_parameters": scaling, "max_position_embeddings": 131072}, 10000.0, "config.json"
    )
    found, factor = rope.inverse_frequencies(head_size)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    assert factor == pytest.approx(wanted_factor, rel=1e-12)


def test_both_config_styles_are_the_same_rope() -> None:
    old = {"rope_theta": 500000.0, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "linear", "factor": 2.0}}
    assert read_rope(old, 1e4, "x").inverse_frequencies(64)[0].tolist() == (
        read_rope(new, 1e4, "x").inverse_frequencies(64)[0].tolist()
    )


def test_an_absent_base_is_the_default() -> None:
    assert read_rope({}, 10000.0, "x").theta == 10000.0
    assert read_rope({"rope_scaling": None, "rope_theta": 5.0}, 10000.0, "x").theta == 5.0


def test_the_table_holds_cosines_then_sines() -> None:
    rope = read_rope({}, 10000.0, "x")
    table = rope.table(3, 5, 8)
    angles = torch.tensor([[3.0], [4.0]]) * rope.inverse_frequencies(8)[0]
    wanted = torch.cat((angles.cos(), angles.sin()), dim=1)  # which torch rounds less well
    torch.testing.assert_close(table, wanted, rtol=1.2e-7, atol=0)


@pytest.mark.parametrize("name", SCALINGS)
def test_a_definition_makes_the_table_that_transformers_rotates_by(name: str) -> None:
    """In the model's dtype, of the longest positions."""
    scaling = {**SCALINGS[name], "rope_theta": 500000.0}
    rope = read_rope(
        {"rope_parameters": scaling, "max_position_embeddings": 131072}, 10000.0, "config.json"
    )
    frequencies, factor = rope.inverse_frequencies(128)
    angles = torch.arange(130_000, 131_072, dtype=torch.float32)[:, None] * frequencies
    wanted = torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)
    table = rope.table(130_000, 131_072, 128)
    torch.testing.assert_close(table, wanted, rtol=2.4e-7, atol=1e-9)
    assert (table.bfloat16() != wanted.bfloat16()).sum() <= 4  # of 137,216


@pytest.mark.parametrize(
    ("config", "error", "text"),
    [
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, Unsupported, "longrope"),
        ({"partial_rotary_factor": 0.5}, Unsupported, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "linear"}}, CorruptFile, "factor"),
        ({"rope_scaling": {"type": "linear", "factor": -1.0}}, CorruptFile, "factor"),
        ({"rope_scaling": "linear"}, CorruptFile, "not an object"),
    ],
)
def test_what_has_no_table_is_refused_by_name(
    config: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        read_rope(config, 10000.0, "config.json")
