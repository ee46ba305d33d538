"""The dense baseline: the same weights in the best graph that ONNX Runtime has operators for.

GroupQueryAttention with rotary inside, packed QKV and the cache bound in place, and fused skip +
RMSNorm: the graph that ONNX Runtime's own model builder makes for this family.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper as oh
from onnx import TensorProto, numpy_helper

from edgepool.config import ModelConfig

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT32


def dense_model(config: ModelConfig, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    """ONNX graph with inputs input_ids [1,S], last [1,S'] rows of logits, seqlens_k [1], total [].

    The cache is `past_k.I`, `past_v.I` [1,Hkv,N,D] and `present_*`: bind both to one buffer.
    """
    c = config
    nodes: list[onnx.NodeProto] = []
    tensors = [_rotary_table(c, "cos", np.cos), _rotary_table(c, "sin", np.sin)]
    cache = ["batch", c.num_kv_heads, "capacity", c.head_dim]
    inputs = [
        oh.make_tensor_value_info("input_ids", INT, ["batch", "seq"]),
        oh.make_tensor_value_info("logit_rows", INT, ["rows"]),
        oh.make_tensor_value_info("seqlens_k", INT, ["batch"]),
        oh.make_tensor_value_info("total_length", INT, []),
    ]
    outputs = [oh.make_tensor_value_info("logits", FLOAT, ["batch", "rows", c.vocab_size])]

    def weight(name: str, value: np.ndarray) -> str:
        tensors.append(numpy_helper.from_array(np.ascontiguousarray(value, np.float32), name))
        return name

    def add(op: str, ins: list[str], outs: list[str], **attributes: object) -> str:
        domain = "" if op in ("Gather", "MatMul", "Mul", "Sigmoid", "Gemm") else "com.microsoft"
        domain = "" if op == "SimplifiedLayerNormalization" else domain
        nodes.append(oh.make_node(op, ins, outs, domain=domain, **attributes))
        return outs[0]

    def matmul(x: str, name: str, value: np.ndarray) -> str:
        return add("MatMul", [x, weight(name, value.T)], [name + ".out"])

    norm = dict(epsilon=c.rms_norm_eps)
    stream = add("Gather", [weight("embed", weights["embed.weight"]), "input_ids"], ["embedded"])
    pending = ""
    for i in range(c.num_layers):
        w = {n.split(".", 2)[2]: v for n, v in weights.items() if n.startswith(f"layers.{i}.")}
        name = f"layers.{i}."
        gamma = weight(name + "attn_norm", w["attn_norm.weight"])
        x = name + "normed"
        if pending:
            after = name + "stream"
            add(
                "SkipSimplifiedLayerNormalization",
                [stream, pending, gamma],
                [x, "", "", after],
                **norm,
            )
            stream = after
        else:
            add("SimplifiedLayerNormalization", [stream, gamma], [x], axis=-1, **norm)
        packed = np.concatenate([w[f"{p}_proj.weight"] for p in "qkv"])
        qkv = matmul(x, name + "qkv", packed)
        past, present = ([f"{p}_{s}.{i}" for s in "kv"] for p in ("past", "present"))
        add(
            "GroupQueryAttention",
            [qkv, "", "", *past, "seqlens_k", "total_length", "cos", "sin"],
            [name + "attended", *present],
            num_heads=c.num_heads,
            kv_num_heads=c.num_kv_heads,
            do_rotary=1,
        )
        inputs += [oh.make_tensor_value_info(p, FLOAT, cache) for p in past]
        outputs += [oh.make_tensor_value_info(p, FLOAT, cache) for p in present]
        out = matmul(name + "attended", name + "o", w["o_proj.weight"])
        gamma = weight(name + "mlp_norm", w["mlp_norm.weight"])
        x, after = name + "mlp_in", name + "mlp_stream"
        add("SkipSimplifiedLayerNormalization", [stream, out, gamma], [x, "", "", after], **norm)
        stream = after
        gate, up = (matmul(x, name + p, w[f"{p}_proj.weight"]) for p in ("gate", "up"))
        silu = add("Mul", [gate, add("Sigmoid", [gate], [name + "sigmoid"])], [name + "silu"])
        wide = add("Mul", [silu, up], [name + "wide"])
        pending = matmul(wide, name + "down", w["down_proj.weight"])
    gamma = weight("norm", weights["norm.weight"])
    add("SkipSimplifiedLayerNormalization", [stream, pending, gamma], ["final"], **norm)
    rows = add("Gather", ["final", "logit_rows"], ["final_rows"], axis=1)
    head = weights["embed.weight" if c.tie_embeddings else "lm_head.weight"]
    add("MatMul", [rows, weight("head", head.T)], ["logits"])
    graph = oh.make_graph(nodes, "dense", inputs, outputs, tensors)
    imports = [oh.make_opsetid("", 20), oh.make_opsetid("com.microsoft", 1)]
    return oh.make_model(graph, opset_imports=imports, ir_version=9)


def _rotary_table(c: ModelConfig, name: str, function: np.ufunc) -> onnx.TensorProto:
    """[max_context, D/2]: plain rotary, which is all that the benchmarked shape uses."""
    if c.rope_scaling is not None or not all(c.rope_layers):
        raise ValueError("the dense baseline has plain rotary embeddings only")
    frequency = c.rope_theta ** -(np.arange(0, c.head_dim, 2) / c.head_dim)
    angle = np.arange(c.max_context)[:, None] * frequency
    return numpy_helper.from_array(function(angle).astype(np.float32), name)
