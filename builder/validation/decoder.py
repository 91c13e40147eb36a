"""Is a plan the decoder that config.json describes? Every value gets a meaning, from the operators
in order; each operator must read what has the meaning it is for.

The residual stream is numbered by what was added to it: stream 0 is the embedding, stream 2 i + 1
has the attention of layer i in it, stream 2 i + 2 its MLP. What follows from stream k has number k.

    stream k, branch k -> stream k + 1, normal k + 1         a norm with its residual
    normal 2 i -> qkv -> q -> heads -> branch 2 i            attention of layer i
    normal 2 i + 1 -> gate_up -> product -> branch 2 i + 1   its MLP
    normal 2 L -> logits

On several ranks a branch is made in two: partial sums of each rank, then the sum over all; and each
rank makes a share of the logits, which are gathered.

Gathering rows and quantizing change no meaning. What quantized a value scales it where it is read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from llmctl.builder.plan import Plan, PlanOp
from llmctl.builder.validation.errors import wrong
from llmctl.plugins.ops.packed_linear.forms import few_tokens

_OWN_ROLES = ("weight", "weight_scale", "bias", "norm_weight", "q_norm", "k_norm")
_SUMMING = ("leaves", "is_partial")
_EMBEDDINGS = ("embedding", "embedding_norm")


class _Meaning(NamedTuple):
    kind: str
    number: int
    scale: str | None = None  # the tensor that a quantized value is scaled by


class Sums(NamedTuple):
    """How config.json says that the products of branches add K. is_packed: packed products leave
    the parts of a rank's sum to all_reduce."""

    num_ranks: int
    leaves: int  # over all ranks; 1: in one chain each
    is_packed: bool

    @property
    def attributes(self) -> dict[str, Any]:
        """Those of the products."""
        leaves = {"leaves": self.leaves // self.num_ranks} if self.leaves > 1 else {}
        return leaves | ({"is_partial": True} if self.is_split else {})

    @property
    def is_split(self) -> bool:
        """Whether all_reduce ends such a product."""
        return self.num_ranks > 1 or (self.is_packed and self.leaves > 1)

    @property
    def summed(self) -> int:
        """Parts that all_reduce adds of each rank."""
        return max(self.leaves // self.num_ranks, 1) if self.is_packed else 1


class Decoder:
    """Walks the operators of a plan. Raises CorruptEngine for one that is not where it belongs."""

    def __init__(self, plan: Plan, num_layers: int, has_tied_head: bool, sums: Sums) -> None:
        self._plan = plan
        self._last = 2 * num_layers
        self._has_tied_head = has_tied_head
        self._sums = sums
        self._values: dict[str, _Meaning] = {}
        self._embedding = ""
        self._cache_scales: dict[int, tuple[str | None, ...]] = {}
        self._own: Counter[str] = Counter()
        self._pushed: dict[str, int] = {}  # sums, and of how many tokens they are handed on
        self._kept: set[str] = set()  # streams of which a rank has its own rows alone

    def check(self) -> None:
        """All operators, then what the outputs are."""
        for op in self._plan.ops:
            for role in _OWN_ROLES:
                if role in op.inputs and not self._shares_embedding(op, role):
                    self._own[op.inputs[role]] += 1
            if op.op not in _RULES:
                raise wrong(f"operator {op.name!r} is a {op.op}, which no decoder has")
            self._require_whole(op)
            _RULES[op.op](self, op)
        for name, count in self._own.items():
            if count > 1:
                raise wrong(f"weight {name!r} is used by {count} operators")
        if self._pushed:
            raise wrong(f"nothing takes the sums {sorted(self._pushed)[0]!r} that are handed on")
        layers = sum(meaning.kind == "heads" for meaning in self._values.values())
        wanted = {"logits": ("logits", self._last), "hidden": ("normal", self._last)}
        wanted |= {f"layers.{i}": ("stream", 2 * i) for i in range(self._last // 2)}
        wanted[f"layers.{self._last // 2}"] = ("normal", self._last)
        for role, name in self._plan.outputs.items():
            if role not in wanted:
                raise wrong(f"the plan has an output {role!r}; {', '.join(wanted)} are there")
            if name in self._kept or self._values[name][:2] != wanted[role]:
                raise wrong(f"output {role!r} is {name!r}, which holds {self._named(name)}")
        if "logits" not in self._plan.outputs:
            raise wrong(f"the plan of {layers} attentions has no output 'logits'")

    # ---- operators ----

    def _embed(self, op: PlanOp) -> None:
        if self._embedding:
            raise wrong(f"operator {op.name!r} embeds the tokens a second time")
        self._embedding = op.inputs["weight"]
        self._values[op.outputs["embedded" if "embedded" in op.outputs else "out"]] = _Meaning(
            "stream", 0
        )
        if "embedded" in op.outputs:
            self._values[op.outputs["out"]] = _Meaning("normal", 0, self._quantizer(op))

    def _norm(self, op: PlanOp) -> None:
        self._values[op.outputs["out"]] = self._normalized(op, self._quantizer(op))

    def _normalized(self, op: PlanOp, scale: str | None) -> _Meaning:
        """What the norm of `x`, or of x and the residual, gives; the sum is noted."""
        if "residual" not in op.inputs:
            self._require(op, "x", "stream", 0)
            return _Meaning("normal", 0, scale)
        return self._added(op, self._take(op, "x", "branch"), scale)

    def _added(self, op: PlanOp, branch: _Meaning, scale: str | None) -> _Meaning:
        """What the norm of a branch and the residual gives; the sum is noted."""
        self._require(op, "residual", "stream", branch.number)
        if "residual_out" in op.outputs:
            self._values[op.outputs["residual_out"]] = _Meaning("stream", branch.number + 1)
        return _Meaning("normal", branch.number + 1, scale)

    def _multiply(self, op: PlanOp) -> None:
        """A product: what it is follows from what it reads."""
        if "norm_weight" in op.inputs:
            read = self._normalized(op, op.inputs.get("x_scale"))
            self._values[op.outputs["normal"]] = read
        else:
            read = self._take(op, "x", "normal", "heads", "product")
        kind = "branch"
        if read.kind == "normal":
            is_last, is_mlp = read.number == self._last, bool(read.number % 2)
            kind = "logits" if is_last else "gate_up" if is_mlp else "qkv"
        made = _Meaning(kind, read.number)
        wanted = self._sums.attributes if kind == "branch" else {}
        found = {name: op.attributes[name] for name in _SUMMING if name in op.attributes}
        if found != wanted:
            raise wrong(f"operator {op.name!r} adds by {found}; {wanted} is wanted")
        if "is_partial" in found:  # scaled after the sum over ranks
            made = _Meaning("partial", read.number, read.scale)
            self._note_pushed(op)
        else:
            self._require_scale(op, read)
        if op.op == "packed_linear_swiglu":
            self._expect(op, made, "gate_up")
            made = _Meaning("product", read.number, op.inputs.get("scale"))
        if op.op == "packed_linear_rope_kv":
            self._expect(op, made, "qkv")
            made = self._cached(op, read.number)
        out = op.outputs["q" if "q" in op.outputs else "out"]
        self._values[out] = made

    def _sum(self, op: PlanOp) -> None:
        self._values[op.outputs["out"]] = self._summed(op)

    def _summed(self, op: PlanOp) -> _Meaning:
        read = self._take(op, "x", "partial")
        self._require_scale(op, read)
        self._require_ranks(op, is_there=self._sums.is_split)
        if op.attributes.get("leaves", 1) != self._sums.summed:
            raise wrong(f"operator {op.name!r} adds other parts of a rank than the engine has")
        return _Meaning("branch", read.number)

    def _require_whole(self, op: PlanOp) -> None:
        """What ranks keep rows of is read by the next sum alone."""
        for role, name in op.inputs.items():
            if name in self._kept and (op.op, role) != ("all_reduce_norm", "residual"):
                raise wrong(f"operator {op.name!r} reads {name!r}, of which ranks keep rows")
        kept = op.outputs.get("residual_out", "") if op.attributes.get("keeps", 0) else ""
        self._kept = self._kept - set(op.outputs.values()) | {kept}

    def _note_pushed(self, op: PlanOp) -> None:
        ranks = op.attributes.get("pushed_to", self._sums.num_ranks)
        if ranks != self._sums.num_ranks:
            raise wrong(f"operator {op.name!r} hands sums to {ranks} ranks")
        if "pushed_to" in op.attributes:
            self._pushed[op.outputs["out"]] = few_tokens(op.tactic)

    def _sum_and_norm(self, op: PlanOp) -> None:
        given = self._pushed.pop(op.inputs["x"], 0)
        if op.attributes.get("pushed", 0) != given:
            raise wrong(
                f"operator {op.name!r} takes other sums than the product before it hands on"
            )
        self._values[op.outputs["out"]] = self._added(op, self._summed(op), self._quantizer(op))

    def _collect(self, op: PlanOp) -> None:
        self._require_ranks(op, is_there=self._sums.num_ranks > 1)
        self._values[op.outputs["out"]] = self._take(op, "x", "logits")

    def _activate(self, op: PlanOp) -> None:
        read = self._take(op, "x", "gate_up")
        self._values[op.outputs["out"]] = _Meaning("product", read.number, self._quantizer(op))

    def _write_cache(self, op: PlanOp) -> None:
        read = self._take(op, "qkv", "qkv")
        self._values[op.outputs["q"]] = self._cached(op, read.number)

    def _cached(self, op: PlanOp, number: int) -> _Meaning:
        layer = op.attributes["layer"]
        if layer != number // 2:
            raise wrong(f"operator {op.name!r} has the layer {layer}; it is of {number // 2}")
        self._cache_scales[number] = (op.inputs.get("k_scale"), op.inputs.get("v_scale"))
        return _Meaning("q", number)

    def _attend(self, op: PlanOp) -> None:
        read, layer = self._take(op, "q", "q"), op.attributes["layer"]
        if layer != read.number // 2:
            raise wrong(f"operator {op.name!r} has the layer {layer}; it is of {read.number // 2}")
        scales = (op.inputs.get("k_scale"), op.inputs.get("v_scale"))
        if scales != self._cache_scales[read.number]:
            raise wrong(f"operator {op.name!r} reads keys and values by other scales than written")
        made = _Meaning("heads", read.number, op.inputs.get("out_scale"))
        self._values[op.outputs["out"]] = made

    def _quantize(self, op: PlanOp) -> None:
        read = self._take(op, "x", "normal", "heads", "product")
        self._values[op.outputs["out"]] = read._replace(scale=self._quantizer(op))

    def _gather(self, op: PlanOp) -> None:
        read = self._take(op, "x", "normal", "heads", "product", "stream", "branch")
        self._values[op.outputs["out"]] = read

    # ---- what they share ----

    def _shares_embedding(self, op: PlanOp, role: str) -> bool:
        """Whether it is the head of a model whose head is its embedding."""
        is_weight = role == "weight" and op.inputs[role] == self._embedding
        return is_weight and self._has_tied_head and op.op not in _EMBEDDINGS

    def _quantizer(self, op: PlanOp) -> str | None:
        return op.inputs.get("scale") or op.outputs.get("out_scale")

    def _require_scale(self, op: PlanOp, read: _Meaning) -> None:
        if op.inputs.get("x_scale") != read.scale:
            raise wrong(
                f"operator {op.name!r} scales its input by {op.inputs.get('x_scale')!r}; "
                f"{read.scale!r} quantized it"
            )

    def _require_ranks(self, op: PlanOp, *, is_there: bool) -> None:
        found, wanted = op.attributes["ranks"], self._sums.num_ranks
        if found != wanted or not is_there:
            raise wrong(f"operator {op.name!r} is over {found} ranks; the engine has {wanted}")

    def _take(self, op: PlanOp, role: str, *kinds: str) -> _Meaning:
        meaning = self._values.get(op.inputs[role])
        if meaning is None or meaning.kind not in kinds:
            raise wrong(
                f"operator {op.name!r} ({op.op}) reads as {role} {self._named(op.inputs[role])}; "
                f"wanted {' or '.join(kinds)}"
            )
        return meaning

    def _require(self, op: PlanOp, role: str, kind: str, number: int) -> None:
        if self._take(op, role, kind).number != number:
            raise wrong(
                f"operator {op.name!r} ({op.op}) reads as {role} {self._named(op.inputs[role])}; "
                f"wanted {kind} {number}"
            )

    def _expect(self, op: PlanOp, made: _Meaning, kind: str) -> None:
        if made.kind != kind:
            raise wrong(f"operator {op.name!r} ({op.op}) computes {made.kind} {made.number}")

    def _named(self, tensor: str) -> str:
        meaning = self._values.get(tensor)
        return f"{tensor!r} ({'unknown' if meaning is None else f'{meaning[0]} {meaning[1]}'})"


_RULES: Mapping[str, Callable[[Decoder, PlanOp], Any]] = {
    "embedding": Decoder._embed,
    "embedding_norm": Decoder._embed,
    "rms_norm": Decoder._norm,
    "linear": Decoder._multiply,
    "packed_linear": Decoder._multiply,
    "packed_linear_swiglu": Decoder._multiply,
    "packed_linear_rope_kv": Decoder._multiply,
    "swiglu": Decoder._activate,
    "rope_kv_write": Decoder._write_cache,
    "paged_attention": Decoder._attend,
    "quantize": Decoder._quantize,
    "gather_rows": Decoder._gather,
    "all_reduce": Decoder._sum,
    "all_reduce_norm": Decoder._sum_and_norm,
    "all_gather": Decoder._collect,
}
