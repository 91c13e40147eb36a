"""The graphs of an EAGLE head, first of EAGLE-3.

A step reads a pair for each row: a feature, and the token behind it. Pair i is of position i: the
feature of token i, and token i + 1.

    EXTEND, once a round: pairs that are committed. g = fc(what three layers of the target read)
    NEXT, after each draft: the draft behind a row. g = what that row put out, in place of a feature

    u = input_layernorm(embed(token)), hidden_norm(g)      side by side
    o = g + attention(u);  o = o + mlp(post_attention_layernorm(o))
    logits = lm_head(norm(o)), of a reduced vocabulary

Layers behind this one, where there are some, are those of any decoder: u = input_layernorm(o).

o goes on to NEXT. Both write keys and values of their pairs to one cache, which the next EXTEND
writes over where they were of drafts. It gives o and logits of the rows alone that its step names:
one for each sequence. What it reads of the target is copied to its input by whoever runs it, for
only some rows of a step are accepted. With norm_before_residual the residual is hidden_norm(g);
with norm_before_fc fc reads input_norm of the features, with fc_norm each of them has a norm of its
own; with norm_output norm(o) goes on to NEXT.

A head of EAGLE-1 or 2 reads one feature, what the target's output matrix reads, and puts out the
next one, which takes its place.

    u = fc(embed(token), g side by side)
    o = u + attention(u);  o = o + mlp(post_attention_layernorm(o))
    logits = the target's output matrix times o
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
from llmctl.builder.heads.eagle.config import DEFAULT_THETA
from llmctl.builder.heads.eagle.names import CACHE, EXTEND, MODULE, NEXT, STATE, feature_inputs
from llmctl.builder.heads.eagle.shapes import FIRST
from llmctl.builder.heads.eagle.vocabulary import OFFSETS, DraftIndex
from llmctl.builder.models.decoder import EMBEDDING, LM_HEAD
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
        self._is_first = facts["version"] == 1
        # No further than the target's widest layer, so that what that drops can be dropped.
        widest = max(model.windows) if all(model.windows) else 0
        self._cache = HeadCache(
            CACHE,
            facts["num_kv_heads"],
            facts["head_size"],
            tuple(min(own or widest, widest or own) for own in facts["windows"]),
            read_rope(facts["rope"], DEFAULT_THETA, "the head's RoPE"),
        )

    def record(self) -> list[Network]:
        """Both graphs."""
        taps, are_apart = self._facts["taps"], self._facts["fc_norm"]
        with recording(Network(self._dtype, name=EXTEND, cache=self._cache)) as extend:
            g = self._feature(
                [
                    graph_input(name, "tokens", len(read) * self._model.hidden_size, beside=read)
                    for name, read in feature_inputs(taps, are_apart=are_apart).items()
                ]
            )
            out = self._layers(g)
            self._finish(gather_rows(out, name=f"{EXTEND}.gather_rows", most="requests"))
        with recording(Network(self._dtype, name=NEXT, cache=self._cache)) as following:
            g = graph_input(STATE, "beams", self._width)
            self._finish(self._layers(g))
        return [extend, following]

    def _feature(self, inputs: list[Tensor]) -> Tensor:
        """g of what is read of the target."""
        features = inputs[0]
        if self._is_first:
            return features
        if self._facts["fc_norm"]:
            features, *others = (self._norm(f"fc_norm.{i}", x) for i, x in enumerate(inputs))
            for index, other in enumerate(others, 1):
                features = concat(features, other, name=f"{EXTEND}.fc_norm.{index}.concat")
        if self._facts["norm_before_fc"]:
            features = self._norm("input_norm", features)
        return self._linear("fc", features, self._width)

    def _token(self, g: Tensor) -> Tensor:
        """The embedding of the token beside each g."""
        model, graph = self._model, current().name
        name, rows = (
            (f"{MODULE}.embed_tokens", self._width)
            if self._facts["has_embedding"]
            else (EMBEDDING, model.hidden_size)
        )
        table = parameter(f"{name}.weight", model.vocab_size, rows)
        return embedding(table, name=f"{graph}.embed_tokens", most=g.shape[0])

    def _layers(self, g: Tensor) -> Tensor:
        """What the last layer puts out."""
        out = self._first(g)
        for layer in range(1, len(self._cache.windows)):
            x = self._norm(f"layers.{layer}.input_layernorm", out)
            out = self._behind(layer, self._attention(layer, x), out)
        return out

    def _first(self, g: Tensor) -> Tensor:
        graph, token = current().name, self._token(g)
        if self._is_first:
            x = concat(token, g, name=f"{graph}.{FIRST}.concat")
            u = self._linear("fc", x, self._width, has_bias=self._facts["has_fc_bias"])
            return self._behind(0, self._attention(0, u), u)
        x = self._norm(f"{FIRST}.input_layernorm", token)
        normal = self._norm(f"{FIRST}.hidden_norm", g)
        x = self._attention(0, concat(x, normal, name=f"{graph}.{FIRST}.concat"))
        return self._behind(0, x, normal if self._facts["norm_before_residual"] else g)

    def _behind(self, layer: int, attended: Tensor, residual: Tensor) -> Tensor:
        """A layer's output from that of its attention."""
        prefix = f"layers.{layer}"
        name = f"{current().name}.{prefix}"
        g = add(attended, residual, name=f"{name}.attention_residual")
        x = self._mlp(layer, self._norm(f"{prefix}.post_attention_layernorm", g))
        return add(x, g, name=f"{name}.mlp_residual")

    def _attention(self, layer: int, x: Tensor) -> Tensor:
        prefix, facts, graph = f"layers.{layer}.self_attn", self._facts, current().name
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
            layer=layer,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            window=self._cache.windows[layer],
            epsilon=facts["norm_epsilon"],
        )
        return self._linear(f"{prefix}.o_proj", out, self._width)

    def _mlp(self, layer: int, x: Tensor) -> Tensor:
        prefix, graph = f"layers.{layer}.mlp", current().name
        inner = self._facts["intermediate_size"]
        gate = self._linear(f"{prefix}.gate_proj", x, inner)
        up = self._linear(f"{prefix}.up_proj", x, inner)
        product = mul(
            silu(gate, name=f"{graph}.{prefix}.act"), up, name=f"{graph}.{prefix}.product"
        )
        return self._linear(f"{prefix}.down_proj", product, self._width)

    def _finish(self, out: Tensor) -> None:
        graph, vocab = current().name, self._facts["draft_vocab_size"]
        if self._is_first:
            graph_output(STATE, out)
            name = EMBEDDING if self._model.tie_word_embeddings else LM_HEAD
            weight = parameter(f"{name}.weight", self._model.vocab_size, self._width)
            graph_output("logits", linear(out, weight, name=f"{graph}.lm_head", dtype="float32"))
            return
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

    def _linear(self, name: str, x: Tensor, width: int, *, has_bias: bool = False) -> Tensor:
        inner = x.shape[1]
        assert isinstance(inner, int)
        weight = parameter(f"{MODULE}.{name}.weight", width, inner)
        bias = parameter(f"{MODULE}.{name}.bias", width) if has_bias else None
        return linear(x, weight, bias, name=f"{current().name}.{name}")
