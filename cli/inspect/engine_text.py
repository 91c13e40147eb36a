"""What `llmctl inspect` prints about an engine, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llmctl.builder.speculative_modes import mode_of
from llmctl.cli.inspect.by_ranks import draft_line, span
from llmctl.cli.inspect.piece_text import piece_text
from llmctl.cli.table import size, table
from llmctl.plugins.ops.paged_attention.fp8_context import GROUP

SHORT_DTYPES = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "int8": "int8",
    "int32": "int32",
}
_OP_HEAD = ("operator", "weights", "reads", "us", "does", "on", "tactic")
_KERNEL_COLUMNS = ("registers", "threads", "shared_bytes", "local_bytes", "num_bytes")


def engine_text(engine: Mapping[str, Any]) -> Iterator[str]:
    yield str(engine["path"])
    origin = ("signature", signature_text(engine["signature"]))
    facts = (*attention_rows(engine), *rank_rows(engine))
    yield from table([*summary_rows(engine["config"]), *facts, origin])
    if "verified" in engine:
        counts = ", ".join(f"{count} {name}" for name, count in engine["verified"].items())
        yield from table([("verified", counts)])
    yield from ("", "memory")
    yield from table(list(memory_rows(engine)))
    yield from ("", step_line(engine["step"]))
    yield from step_lines_by_ranks(engine["ranks"]["step_ms"])
    for group in engine["layers"]:
        yield from ("", _title(group))
        yield from table([_OP_HEAD, *map(_op_row, group["ops"])], right=(1, 2, 3))
    yield from ("", f"outputs: {', '.join(engine['outputs'])}")
    for each in engine["fused"]:
        yield f"operators {each['start']} to {each['stop'] - 1} in one launch: {each['kernel']}"
    for head in engine["heads"]:
        given = ", ".join(f"{name} ({source})" for name, source in head["inputs"].items())
        yield from ("", f"head {head['name']}: {given} -> {', '.join(head['outputs'])}")
        yield head_line(head["step"])
        yield from table([_OP_HEAD, *map(_op_row, head["ops"])], right=(1, 2, 3))
    if engine["kernels"]:
        yield from ("", f"kernels ({len(engine['kernels'])})")
        head = ("name", "registers", "threads", "shared", "local", "bytes")
        rows = [
            (
                " for ".join(filter(None, (kernel["name"], kernel["capability"]))),
                *(str(kernel[name]) for name in _KERNEL_COLUMNS),
            )
            for kernel in engine["kernels"]
        ]
        yield from table([head, *rows], right=range(1, len(head)))
    for piece in engine["trt_pieces"]:
        yield ""
        yield from piece_text(piece)
    yield from ("", "files")
    rows = [(str(file["name"]), size(file["bytes"])) for file in engine["files"]]
    yield from table(rows, right=(1,))


def summary_rows(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    model, build, weights = config["pretrained_config"], config["build_config"], config["weights"]
    quantization, capability = model["quantization"], config["compute_capability"]
    yield (
        "model",
        f"{model['architecture']}, {model['num_hidden_layers']} layers, "
        f"hidden {model['hidden_size']}, vocabulary {model['vocab_size']}",
    )
    target = f", compute capability {capability}" if capability else ""
    yield "backend", f"{config['backend']}{target}, {model['dtype']}"
    yield (
        "quantization",
        f"weights {quantization['quant_algo'] or 'none'}, "
        f"KV cache {quantization['kv_cache_quant_algo'] or build['kv_cache_dtype']}",
    )
    yield (
        "limits",
        f"{build['max_batch_size']} sequences of {build['max_seq_len']} tokens, "
        f"{build['max_num_tokens']} tokens per step, {build['max_draft_len']} draft tokens, "
        f"{build['tokens_per_block']} tokens a block",
    )
    heads = build.get("draft_heads")
    if heads:
        yield "draft heads", mode_of(build["speculative_decoding_mode"]).describe(heads)
    given = ", ".join(f"{k} {v}" for k, v in weights.items() if k != "load_format")
    yield "load format", f"{weights['load_format']}{': ' if given else ''}{given}"
    yield "source", str(config["source"].get("checkpoint", "unknown"))
    if "quantized_from" in config["source"]:
        yield "quantized from", str(config["source"]["quantized_from"])
    yield "tokenizer", str(config["tokenizer"].get("hash") or "none")
    yield "versions", ", ".join(f"{name} {text}" for name, text in config["versions"].items())
    yield "command", str(config["command"]) or "none (built by a program)"


def attention_rows(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Nothing where all attention has 16-bit products."""
    if engine["has_fp8_generation"]:
        yield (
            "attention",
            "FP8 products for every token: drafts are chains, and no step is one launch",
        )
    elif engine["has_fp8_context"]:
        yield "prompts", f"attention with FP8 products, {GROUP} tokens at a time"


def rank_rows(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Nothing for an engine of one rank whose sums are in the usual order."""
    ranks, model = engine["ranks"], engine["config"]["pretrained_config"]
    order = ", sums in the order of every tp_size" if ranks["is_invariant"] else ""
    if ranks["count"] > 1 or order:
        yield (
            "ranks",
            f"{ranks['count']}, each with {ranks['num_heads']} of {model['num_attention_heads']} "
            f"heads and {ranks['num_kv_heads']} of {model['num_key_value_heads']} KV heads{order}; "
            "what follows is of one rank",
        )


def signature_text(signature: Mapping[str, str | None]) -> str:
    """Whose it is, and what is known of it."""
    state, key = signature["state"], signature["key"]
    if state == "unsigned":
        return "none (unsigned)"
    if state == "trusted":
        return f"{key}, the trusted builder's"
    if state == "valid":
        return f"{key}, by the key it names (--trusted-builder KEYFILE compares it with yours)"
    return f"{state}{f', by {key}' if key else ''}: {signature['problem']}"


def memory_rows(engine: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    memory, build = engine["memory"], engine["config"]["build_config"]
    is_stored = engine["config"]["weights"]["load_format"] == "auto"
    yield "weights", size(memory["weight_bytes"]) + ("" if is_stored else ", generated by run")
    for found in engine["rotary_tables"]:
        yield (
            f"of them {found['name']}",
            f"{size(found['bytes'])}, computed when it is loaded: {found['positions']} positions "
            f"of {found['head_size']}",
        )
    yield (
        "activations",
        f"{size(memory['activation_bytes'])} for {build['max_num_tokens']} tokens per step",
    )
    if engine["kernels"]:
        yield "scratch", size(memory["scratch_bytes"])
        yield "kernels", size(memory["kernel_bytes"])
    yield (
        "KV cache",
        f"{memory['kv_bytes_per_token']} bytes a token, "
        f"{size(memory['kv_bytes_per_sequence'])} a sequence of {build['max_seq_len']}",
    )


def step_line(step: Mapping[str, Any]) -> str:
    text = (
        f"a step of {step['tokens']} token{'s' if step['tokens'] > 1 else ''} after "
        f"{step['context_len']} reads {size(step['read_bytes'])}"
    )
    count, (least, most) = step["num_meetings"], step["meetings_ms"]
    if step["predicted_ms"] is None:
        return text + (
            " (times: --read-bandwidth GB/S)"
            if step["memory"] is None
            else f" (of {step['memory']} too little is known to predict its time)"
        )
    text += f", predicted {step['predicted_ms']:.3g} ms at {step['read_bytes_s'] / 1e9:.4g} GB/s"
    text += f" ({step['memory']})"
    if most:
        text += f", of which {count} meetings of ranks are {span(least, most)} ms"
    elif count:
        text += f" and whatever {count} meetings of ranks take"
    return text


def head_line(step: Mapping[str, Any]) -> str:
    """A step of one row of a draft head."""
    text = f"a step of a row reads {size(step['read_bytes'])}"
    if step["predicted_ms"] is not None:
        text += f", predicted {span(*step['predicted_ms'])} ms"
    if step["num_meetings"]:
        text += f", with {step['num_meetings']} meetings of ranks"
    return text


def step_lines_by_ranks(steps: Mapping[int, Sequence[float]]) -> Iterator[str]:
    """How long the step would take on other numbers of ranks; nothing where there is no choice."""
    if len(steps) > 1:
        times = ", ".join(f"{span(*bounds)} on {count}" for count, bounds in steps.items())
        yield f"by ranks, computed and not measured, ms: {times}"
        yield from draft_line(steps)


def _title(group: Mapping[str, Any]) -> str:
    """The group's name, and what one layer of it costs."""
    ops = group["ops"]
    cost = f"reads {size(sum(op['read_bytes'] for op in ops))}"
    if ops[0]["predicted_us"] is not None:
        cost += f", {microseconds(sum(op['predicted_us'] for op in ops))} us"
    each = " each" if len(group["layers"]) > 1 else ""
    return f"{group_name(group['layers'])}: {cost}{each}"


def group_name(layers: Sequence[int]) -> str:
    """ "layers 0-3, 5 (5 alike)", or what is outside every layer."""
    if not layers:
        return "outside the layers"
    if len(layers) == 1:
        return f"layer {layers[0]}"
    return f"layers {ranges(layers)} ({len(layers)} alike)"


def microseconds(value: float) -> str:
    """Three digits, no exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value >= 0.001 else "<0.001"


def ranges(numbers: Sequence[int]) -> str:
    """ "0-3, 5" for 0, 1, 2, 3, 5."""
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in found)


def _op_row(op: Mapping[str, Any]) -> tuple[str, ...]:
    """What it is, costs, does, its large inputs and outputs, and its kernel."""
    inputs = " ".join(_value(role, op["inputs"][role]) for role in op["producers"])
    outputs = " ".join(_value(role, tensor) for role, tensor in op["outputs"].items())
    predicted = op["predicted_us"]
    return (
        op["op"],
        size(op["weight_bytes"]) if op["weight_bytes"] else "-",
        size(op["read_bytes"]),
        "-" if predicted is None else microseconds(predicted),
        "+".join(op["fuses"]),
        f"{inputs or 'token ids'} -> {outputs}",
        op["tactic"],
    )


def _value(role: str, tensor: Mapping[str, Any]) -> str:
    return f"{role}:{SHORT_DTYPES[tensor['dtype']]}[{','.join(map(str, tensor['shape']))}]"
