"""ReDrafter heads made for tests, and what plain torch modules make of them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.nn.functional import linear, silu

Tensors = dict[str, torch.Tensor]
RECURRENCES = ("silu", "linear", "sum")


def make_head(
    hidden_size: int,
    vocab_size: int,
    *,
    exit_dim: int | None = None,
    num_layers: int = 2,
    is_rnn: bool = True,
    seed: int = 0,
) -> Tensors:
    """A random head under the names of Apple's trainer, in float32."""
    generator = torch.Generator().manual_seed(seed)
    exit_dim = exit_dim or 2 * hidden_size
    tensors: Tensors = {}

    def add(name: str, rows: int, columns: int, *, has_bias: bool = True) -> None:
        weight = torch.randn((rows, columns), generator=generator)
        tensors[f"{name}.weight"] = weight / columns**0.5
        if has_bias:
            tensors[f"{name}.bias"] = torch.randn(rows, generator=generator) / 2

    if exit_dim != 2 * hidden_size:
        add("input_proj", exit_dim, 2 * hidden_size)
    for layer in range(num_layers):
        add(f"lm_head.{layer}.linear", exit_dim, exit_dim)
    add(f"lm_head.{num_layers}", vocab_size, exit_dim, has_bias=False)
    if is_rnn:
        add("rnn_u", hidden_size, hidden_size)
        add("rnn_w", hidden_size, hidden_size, has_bias=False)
    return tensors


def config_of(tensors: Tensors) -> dict[str, object]:
    """config.json as Apple's trainer writes it."""
    num_layers = sum(name.endswith("linear.weight") for name in tensors)
    vocab_size, exit_dim = tensors[f"lm_head.{num_layers}.weight"].shape
    inner = tensors.get("input_proj.weight")
    return {
        "model_type": "recurrent_drafting_drafter",
        "vocab_size": vocab_size,
        "hidden_size": (exit_dim if inner is None else inner.shape[1]) // 2,
        "exit_dim": exit_dim,
        "num_draft_layers": num_layers,
        "num_lookback_tokens": -1,
        "rnn": "rnn_u.weight" in tensors,
    }


def save_head(folder: Path, tensors: Tensors, **changes: object) -> Path:
    """A folder as the trainer writes it; `changes` are fields of its config.json, None: absent."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    config = {k: v for k, v in {**config_of(tensors), **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def converted(tensors: Tensors) -> Tensors:
    """The same head under the names of TensorRT-LLM's converted checkpoints."""
    num_layers = sum(name.endswith("linear.weight") for name in tensors)
    found: Tensors = {}
    for name, tensor in tensors.items():
        own = "lm_head.weight" if name == f"lm_head.{num_layers}.weight" else name
        own = own.replace("lm_head.", "layers.") if ".linear." in own else own
        found[f"drafter.{own}"] = tensor
    return found


def save_converted(folder: Path, tensors: Tensors, **changes: object) -> Path:
    """A checkpoint of TensorRT-LLM's converter: the head, and what the target has."""
    folder.mkdir(parents=True, exist_ok=True)
    target = {"lm_head.weight": torch.zeros(3, 2), "transformer.ln_f.weight": torch.zeros(2)}
    save_file({**converted(tensors), **target}, folder / "rank0.safetensors")
    own = config_of(tensors)
    config = {
        "architecture": "ReDrafterForLLaMALM",
        "vocab_size": own["vocab_size"],
        "redrafter_num_layers": own["num_draft_layers"],
        "redrafter_hidden_size": own["hidden_size"],
        "redrafter_exit_dim": own["exit_dim"],
        "redrafter_is_rnn": own["rnn"],
        "redrafter_num_beams": 3,
        "redrafter_draft_len_per_beam": 2,
        "redrafter_greedy_search": True,
        **changes,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_as(folder: Path, recurrence: str, tensors: Tensors) -> Path:
    """A folder whose head has this recurrence."""
    return save_converted(folder, tensors) if recurrence == "linear" else save_head(folder, tensors)


class TorchHead:
    """The head of `tensors` (Apple's names) in plain torch, in their dtype."""

    def __init__(self, recurrence: str, tensors: Tensors, embedding: torch.Tensor) -> None:
        self.recurrence, self.tensors, self.embedding = recurrence, tensors, embedding
        self.num_layers = sum(name.endswith("linear.weight") for name in tensors)

    def _linear(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def state(self, tokens: list[int], state: torch.Tensor | None) -> torch.Tensor:
        """The states [N, H] behind tokens [N] and the states before; None: there are none."""
        e = self.embedding[tokens]
        if self.recurrence == "sum":
            return e if state is None else state + e
        x = self._linear("rnn_w", e)
        if self.recurrence == "linear":
            return x if state is None else x + self._linear("rnn_u", state)
        before = torch.zeros_like(e) if state is None else state
        return silu(x + self._linear("rnn_u", before))

    def features(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What the output matrix reads, for hidden rows [N, H] and states [N, H]."""
        x = torch.cat((hidden, state), dim=-1)
        if "input_proj.weight" in self.tensors:
            x = self._linear("input_proj", x)
        for layer in range(self.num_layers):
            x = x + silu(self._linear(f"lm_head.{layer}.linear", x))
        return x

    def logits(self, hidden: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """[N, V] for the same."""
        return self._linear(f"lm_head.{self.num_layers}", self.features(hidden, state))


def fit_head(
    model: torch.nn.Module, texts: list[list[int]], vocab_size: int, steps: int = 5
) -> Tensors:
    """A head that knows some texts: all is random but the output matrix, which is least squares
    over what it reads in the first steps of a round, with the texts' own tokens. It knows them by
    heart where they have fewer tokens than the head has columns; seconds for a few thousand."""
    table = model.get_input_embeddings().weight.detach().float()
    tensors = make_head(table.shape[1], vocab_size, num_layers=1)
    tensors["rnn_w.weight"] /= table.std()
    head = TorchHead("silu", tensors, table)
    gram = 0.01 * torch.eye(2 * table.shape[1])
    sums = torch.zeros(vocab_size, 2 * table.shape[1])
    for ids in (torch.tensor(text) for text in texts):
        with torch.no_grad():
            hidden = model.model(ids[None]).last_hidden_state[0].float()
        state = None
        for step in range(1, 1 + min(steps, len(ids) - 2)):
            count = len(ids) - 1 - step
            before = None if state is None else state[:count]
            state = head.state(ids[step : step + count].tolist(), before)
            x = head.features(hidden[:count], state)
            gram += x.T @ x
            sums.index_add_(0, ids[step + 1 :], x)
    # Least squares gives shares; a softmax of ten times these tells likely from unlikely.
    tensors["lm_head.1.weight"] = 10 * torch.linalg.solve(gram, sums.T).T.contiguous()
    return tensors
