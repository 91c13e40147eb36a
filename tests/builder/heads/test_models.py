"""Whole models in the place of heads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llmctl.builder.build import plan_build
from llmctl.builder.config import BuildRequest
from llmctl.errors import BadConfig
from llmctl.quantize.checkpoint import Checkpoint

DRAFT_ENGINE = "`llmctl run --draft-engine` takes its engine"


@pytest.fixture
def target(new_model, save) -> Path:
    return save(new_model("llama", head_dim=64))


@pytest.mark.parametrize("mode", ["medusa", "redrafter", "eagle"])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_whole_model_is_no_head_and_its_way_is_told(tmp_path, target, mode, is_sharded):
    model = target
    if is_sharded:
        model = tmp_path / "sharded"
        shutil.copytree(target, model)
        names = dict.fromkeys(Checkpoint.open(target).tensors, "model-1.safetensors")
        (model / "model.safetensors").rename(model / "model-1.safetensors")
        index = {"metadata": {}, "weight_map": names}
        (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BadConfig, match=f"{model} holds a whole model; heads are wanted") as caught:
        request = BuildRequest(
            speculative_decoding_mode=mode,
            max_draft_len=0 if mode == "medusa" else 4,
            draft_model_dir=str(model),
        )
        plan_build(target, request, backend="cpu")
    assert DRAFT_ENGINE in caught.value.fix


def test_a_draft_engines_target_takes_no_draft_model():
    mode = "draft_tokens_external"
    with pytest.raises(BadConfig, match=f"and the mode is {mode}") as caught:
        BuildRequest(speculative_decoding_mode=mode, max_draft_len=4, draft_model_dir="draft")
    assert DRAFT_ENGINE in caught.value.fix
