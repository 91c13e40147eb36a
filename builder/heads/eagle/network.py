"""The graphs of an EAGLE-3 head.

A step reads a pair for each row: a feature, and the token behind it. Pair i is of position i: the
feature of token i, and token i + 1.

    EXTEND, once a round: pairs that are committed. g = fc(what three layers of the target read)
    NEXT, after each draft: the draft behind a row. g = what that row put out, in place of a feature

    u = input_layernorm(embed(token)), hidden_norm(g)      side by side
    o = g + attention(u);  o = o + mlp(post_attention_layernorm(o))
    logits = lm_head(norm(o)), of a reduced vocabulary

o goes on to NEXT. Both write keys and values of their pairs to one cache, which the next EXTEND
writes over where they were of drafts. It gives o and logits of the rows alone that its step names:
one for each sequence. What it reads of the target is copied to its input by whoever runs it, for
only some rows of a step are accepted. With norm_before_residual the residual is hidden_norm(g);
with norm_before_fc fc reads input_norm of the features; with norm_output norm(o) goes on to NEXT.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llmctl.builder.functional import (
    add,
    concat,
    embedding,
    expand_logits,
    gather_rows,
    gpt_attention,
    graph_input,
    graph_output,
    linear,
    mul,
    parameter,
    rms_norm,
    silu,
)
from llmctl.builder.heads.eagle.checkpoint import LAYER, MODULE
from llmctl.builder.heads.eagle.config import DEFAULT_THETA
from llmctl.builder.heads.eagle.names import CACHE, EXTEND, FEATURES, NEXT, STATE, tap_name
from llmctl.builder.heads.eagle.vocabulary import OFFSETS, DraftIndex
from llmctl.builder.models.decoder import EMBEDDING
from llmctl.builder.models.family import ModelConfig
from llmctl.builder.network import HeadCache, Network, Tensor, current, recording
from llmctl.builder.rope import read_rope


class Recorder:
    """Records the graphs of one head. facts: those of mode.py."""

    def __init__(self, model: ModelConfig, dtype: str, facts: Mapping[str, Any]) -> None:
        self._model = model
        self._dtype = dtype
        self._facts = facts
        self._width = int(facts["hidden_size"])
        # No further than the target's widest layer, so that what that drops can be dropped.
        self._window = max(model.windows) if all(model.windows) else 0
        self._cache = HeadCache(
            CACHE,
            facts["num_kv_heads"],
            facts["head_size"],
            (self._window,),
            read_rope(facts["rope"], DEFAULT_THETA, "the head's RoPE"),
        )

    def record(self) -> list[Network]:
        """Both graphs."""
        taps = [tap_name(layer) for layer in self._facts["taps"]]
        wide = len(taps) * self._model.hidden_size
        with recording(Network(self._dtype, name=EXTEND, cache=self._cache)) as extend:
            features = graph_input(FEATURES, "tokens", wide, beside=taps)
            if self._facts["norm_before_fc"]:
                features = self._norm("input_norm", features)
            g = self._linear("fc", features, self._width)
            self._finish(gather_rows(self._layer(g), name=f"{EXTEND}.gather_rows", most="requests"))
        with recording(Network(self._dtype, name=NEXT, cache=self._cache)) as following:
            g = graph_input(STATE, "beams", self._width)
            self._finish(self._layer(g))
        return [extend, following]

    def _layer(self, g: Tensor) -> Tensor:
        model, width, graph = self._model, self._width, current().name
        name, rows = (
            (f"{MODULE}.embed_tokens", width)
            if self._facts["has_embedding"]
            else (EMBEDDING, model.hidden_size)
        )
        table = parameter(f"{name}.weight", model.vocab_size, rows)
        token = embedding(table, name=f"{graph}.embed_tokens", most=g.shape[0])
        x = self._norm(f"{LAYER}.input_layernorm", token)
        normal = self._norm(f"{LAYER}.hidden_norm", g)
        x = self._attention(concat(x, normal, name=f"{graph}.{LAYER}.concat"))
        residual = normal if self._facts["norm_before_residual"] else g
        g = add(x, residual, name=f"{graph}.{LAYER}.attention_residual")
        x = self._mlp(self._norm(f"{LAYER}.post_attention_layernorm", g))
        return add(x, g, name=f"{graph}.{LAYER}.mlp_residual")

    def _attention(self, x: Tensor) -> Tensor:
        prefix, facts, graph = f"{LAYER}.self_attn", self._facts, current().name
        heads, kv_heads, size = (facts[k] for k in ("num_heads", "num_kv_heads", "head_size"))
        q = self._linear(f"{prefix}.q_proj", x, heads * size)
        k = self._linear(f"{prefix}.k_proj", x, kv_heads * size)
        v = self._linear(f"{prefix}.v_proj", x, kv_heads * size)
        has_norm = facts["has_qk_norm"]
        out = gpt_attention(
            *(q, k, v),
            parameter(f"{MODULE}.{prefix}.q_norm.weight", size) if has_norm else None,
            parameter(f"{MODULE}.{prefix}.k_norm.weight", size) if has_norm else None,
            name=f"{graph}.{prefix}.attention",
            layer=0,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            window=self._window,
            epsilon=facts["norm_epsilon"],
        )
        return self._linear(f"{prefix}.o_proj", out, self._width)

    def _mlp(self, x: Tensor) -> Tensor:
        prefix, inner, graph = f"{LAYER}.mlp", self._facts["intermediate_size"], current().name
        gate = self._linear(f"{prefix}.gate_proj", x, inner)
        up = self._linear(f"{prefix}.up_proj", x, inner)
        product = mul(
            silu(gate, name=f"{graph}.{prefix}.act"), up, name=f"{graph}.{prefix}.product"
        )
        return self._linear(f"{prefix}.down_proj", product, self._width)

    def _finish(self, out: Tensor) -> None:
        graph, vocab = current().name, self._facts["draft_vocab_size"]
        normal = self._norm("norm", out)
        graph_output(STATE, normal if self._facts["norm_output"] else out)
        weight = parameter(f"{MODULE}.lm_head.weight", vocab, self._width)
        logits = linear(normal, weight, name=f"{graph}.lm_head", dtype="float32")
        if self._facts["is_reduced"]:
            full = self._model.vocab_size
            source = DraftIndex(f"{MODULE}.{OFFSETS}", full)
            index = current().add_weight(f"{MODULE}.draft_index", source)
            logits = expand_logits(logits, index, name=f"{graph}.expand_logits")
        graph_output("logits", logits)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        width = x.shape[1]
        assert isinstance(width, int)
        weight = parameter(f"{MODULE}.{name}.weight", width)
        return rms_norm(x, weight, self._facts["norm_epsilon"], name=f"{current().name}.{name}")

    def _linear(self, name: str, x: Tensor, width: int) -> Tensor:
        inner = x.shape[1]
        assert isinstance(inner, int)
        weight = parameter(f"{MODULE}.{name}.weight", width, inner)
        return linear(x, weight, name=f"{current().name}.{name}")
