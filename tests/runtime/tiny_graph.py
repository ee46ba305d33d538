"""A hand-made ONNX graph with the inputs and outputs of an exported model, written op by op."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgepool.config import ModelConfig, state_specs

HEADER = ("input_ids", "page_table", "past_len", "new_len", "logit_rows")


def embedding(config: ModelConfig) -> np.ndarray:
    """What a token is stored as in the graph's pages, [vocab,head_dim], whole numbers."""
    random = np.random.default_rng(0)
    return random.integers(-9, 9, (config.vocab_size, config.head_dim)).astype(np.float32)


def write_tiny_graph(config: ModelConfig, path: Path, float_type: int = TensorProto.FLOAT) -> Path:
    """logits[b,i,v] = token at logit_rows[b,i] + sum of the sequence's first page + v.

    The step writes its tokens' embeddings into head 0 of k_pool.0 at (page, slot), with ScatterND,
    as the operators do; one sequence, one `full` layer. Other state passes through.
    """
    pool_type = TensorProto.INT8 if config.kv_dtype == "int8" else float_type
    types = {"float": float_type, "float32": TensorProto.FLOAT, "int8": TensorProto.INT8}
    shapes = [["batch", "seq"], ["batch", "logical_pages"], ["batch"], ["batch"], ["batch", "rows"]]
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.INT32, shape)
        for name, shape in zip(HEADER, shapes)
    ]
    outputs = [
        helper.make_tensor_value_info(
            "logits", TensorProto.FLOAT, ["batch", "rows", config.vocab_size]
        )
    ]
    nodes = [
        # position s of the step -> page_table[0, (past + s) / T], slot (past + s) % T
        node("Shape", "input_ids", "seq64", start=1),
        node("Cast", "seq64", "seq", to=TensorProto.INT32),
        node("Squeeze", "seq", "seq0"),
        node("Range", "zero seq0 one", "s"),
        node("Add", "s past_len", "position"),
        node("Div", "position page_size", "logical"),
        node("Mod", "position page_size", "slot"),
        node("Squeeze", "page_table axis0", "table"),
        node("Gather", "table logical", "page"),
        node("Mul", "page zero", "head"),
        node("Unsqueeze", "page axis1", "page1"),
        node("Unsqueeze", "head axis1", "head1"),
        node("Unsqueeze", "slot axis1", "slot1"),
        node("Concat", "page1 head1 slot1", "at32", axis=1),
        node("Cast", "at32", "at", to=TensorProto.INT64),
        node("Squeeze", "input_ids axis0", "ids"),
        node("Gather", "embedding ids", "embedded"),
        node("Cast", "embedded", "stored", to=pool_type),
        node("ScatterND", "k_pool.0 at stored", "k_pool.0_out"),
        # logits
        node("Gather", "table zero", "first"),
        node("Gather", "k_pool.0_out first", "first_page"),
        node("Cast", "first_page", "first_float", to=TensorProto.FLOAT),
        node("ReduceSum", "first_float", "sum", keepdims=0),
        node("Gather", "input_ids logit_rows_flat", "row_ids", axis=1),
        node("Squeeze", "logit_rows axis0", "logit_rows_flat"),
        node("Cast", "row_ids", "row_float", to=TensorProto.FLOAT),
        node("Unsqueeze", "row_float axis2", "row2"),
        node("Add", "row2 sum", "base"),
        node("Add", "base vocabulary", "logits"),
    ]
    nodes.insert(23, nodes.pop(24))  # logit_rows_flat before its use
    for spec in state_specs(config):
        shape = list(spec.shape)
        inputs.append(helper.make_tensor_value_info(spec.name, types[spec.dtype], shape))
        outputs.append(helper.make_tensor_value_info(spec.name + "_out", types[spec.dtype], shape))
        if spec.name != "k_pool.0":
            nodes.append(node("Identity", spec.name, spec.name + "_out"))
    constants = {
        "zero": np.array(0, np.int32),
        "one": np.array(1, np.int32),
        "page_size": np.array(config.page_size, np.int32),
        "axis0": np.array([0], np.int64),
        "axis1": np.array([1], np.int64),
        "axis2": np.array([2], np.int64),
        "embedding": embedding(config),
        "vocabulary": np.arange(config.vocab_size, dtype=np.float32) / 1024,
    }
    initializers = [onnx.numpy_helper.from_array(v, k) for k, v in constants.items()]
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    model.ir_version = 9
    onnx.checker.check_model(model, full_check=True)
    onnx.save(model, path)
    return path


def node(op: str, inputs: str, output: str, **attributes: int) -> onnx.NodeProto:
    return helper.make_node(op, inputs.split(), [output], **attributes)
