"""Greedy acceptance of drafts as TensorRT layers, at the end of a plan that is a whole model."""

from __future__ import annotations

import numpy as np

from llmctl.plugins.backends.tensorrt.layers import ITensor, Layers, model_dtype


def choose_tokens(net: Layers, logits: ITensor) -> ITensor:
    """int32 [batch, rows]: the most likely token of every row of logits [batch * rows, V]."""
    _, best = net.argmax(logits)
    return net.shuffle(best, dims_from=net.shape(net.step["logit_rows"]))


def accept_chain(net: Layers, tokens: ITensor) -> dict[str, ITensor]:
    """How many of `drafts` [batch, rows - 1] equal the model's own tokens [batch, rows], and the
    token that follows them; both [batch, 1]. A draft of -1 is never equal."""
    drafts = net.step["drafts"]
    known = net.network.add_slice(tokens, (0, 0), (0, 0), (1, 1))
    known.set_input(2, net.shape(drafts))
    same = net.elementwise(net.name(known, "known"), drafts, "EQUAL")
    wrong = net.running_sum(net.cast(net.unary(same, "NOT"), "int32"), 1)
    is_right = net.elementwise(wrong, net.constant(np.zeros((1, 1), np.int32), np.int32), "EQUAL")
    accepted = net.reduce(net.cast(is_right, "int32"), "SUM", 1)
    return {"accepted": accepted, "next_token": net.gather_batched(tokens, accepted)}


def accept_tree(net: Layers, tokens: ITensor) -> dict[str, ITensor]:
    """The deepest node whose path equals the model's own tokens.

    tokens[b, i] is the model's token after node i. `parent` and `tree_tokens` [batch, rows]
    describe the nodes, `ancestors` [batch, rows, rows] is 1 where node j lies on the path to node
    i, the root (node 0) left out. accepted: nodes of the path; node: its end; next_token: what
    follows there. All [batch, 1].
    """
    ancestors = net.step["ancestors"]
    dtype = model_dtype(net.trt, ancestors)
    chosen = net.gather_batched(tokens, net.step["parent"])
    same = net.elementwise(chosen, net.step["tree_tokens"], "EQUAL")
    wrong = net.shuffle(net.cast(net.unary(same, "NOT"), dtype), (0, 0, 1))
    none = net.trt.MatrixOperation.NONE
    product = net.network.add_matrix_multiply(ancestors, none, wrong, none)
    mistakes = net.cast(net.name(product, "mistakes"), "float32")
    depth = net.reduce(net.cast(ancestors, "float32"), "SUM", 2)
    zero = net.constant(np.zeros((1, 1, 1), np.float32))
    reached = net.select(net.elementwise(mistakes, zero, "EQUAL"), depth, zero)
    accepted, node = net.argmax(net.shuffle(reached, (0, 0)))
    return {
        "accepted": net.cast(accepted, "int32"),
        "node": node,
        "next_token": net.gather_batched(tokens, node),
    }
