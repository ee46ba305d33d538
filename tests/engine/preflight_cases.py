"""For every preflight rule a graph that breaks it and nothing else, and one that does not.

Graphs are in ONNX's textual form. docs/preflight.md says whose report each rule rests on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

XAVIER, ORIN, ORIN7, RTX, CPU, H100 = (
    "jetson-agx-xavier jetson-agx-orin jetson-agx-orin-jp7 rtx-4090 cpu h100".split()
)
PLUGIN = 'plugin_version = "1", plugin_namespace = "edgepool"'


@dataclass(frozen=True)
class Case:
    """broken and good are whole models, or the body of a main graph in `opset`."""

    rule: str
    target: str
    broken: str
    good: str
    opset: int = 17
    good_target: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    good_options: dict[str, Any] = field(default_factory=dict)
    functions: str = ""
    good_functions: str | None = None


def graph(body: str, opset: int, functions: str = "", ir_version: int = 9) -> str:
    """The text of a model; a body that starts with `<` is one already."""
    if body.startswith("<"):
        return body
    imports = f'["" : {opset}, "edgepool" : 1, "other" : 1]'
    return f"<ir_version: {ir_version}, opset_import: {imports}>\n{body}\n{functions}"


def qdq(
    inputs: str, op: str = "QuantizeLinear", zero: str = "int8 z = {0}", out: str = "int8"
) -> str:
    """One Q or DQ of x with scale s and zero point z, both initialisers."""
    source = "float" if op == "QuantizeLinear" else out
    result = "float" if op == "DequantizeLinear" else out
    constants = ", ".join(filter(None, ("float s = {0.5}", zero)))
    return f"g ({source}[2,3] x) => ({result}[2,3] y) <{constants}> {{ y = {op} ({inputs}) }}"


TWICE = """
<domain: "other", opset_import: ["" : 20]>
Twice (x) => (y) { y = Add (x, x) }
"""
POOL = """
<domain: "edgepool", opset_import: ["" : 20]>
IndexPool (x) => (y) { y = Add (x, x) }
"""
STORED_INT8 = """
g (float[1,2] x) => (float[1,2] y) <int8[2,2] w = {1,2,3,4}, float s = {0.5}, int8 z = {0}> {
  d = DequantizeLinear (w, s, z) y = MatMul (x, d)
}"""
STORED_FLOAT = """
g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1,2,3,4}, float s = {0.5}, int8 z = {0}> {
  q = QuantizeLinear (w, s, z) d = DequantizeLinear (q, s, z) y = MatMul (x, d)
}"""
BRANCHES = """g (float[2] x, bool c) => (float[N] y) {{
  y = If (c) <then_branch = one () => ({a}) {{ {an} = Relu (x) }},
              else_branch = two () => ({b}) {{ {two} }}>
}}"""
LOOP = """g (float[2] x, int64 n, bool c) => (float[N,2] y) {inits} {{
  y = Loop ({count}, c) <body = round (int64 i, bool go) => (bool on, float[2] row) {{
    on = Identity (go)
    row = Relu (x)
  }}>
}}"""


CASES = [
    Case(
        "EP001",
        XAVIER,
        "g (float[2] x) => (float[2] y) { y = Mish (x) }",
        "g (float[2] x) => (float[2] y) { a = Softplus (x) b = Tanh (a) y = Mul (x, b) }",
    ),
    Case(
        "EP002",
        XAVIER,
        "g (float[2] x) => (float[2] y) { y = Relu (x) }",
        "g (float[2] x) => (float[2] y) { y = Relu (x) }",
        opset=20,
        good_target=ORIN,
    ),
    Case(
        "EP003",
        CPU,
        '<ir_version: 11, opset_import: ["" : 20]> g (float[2] x) => (float[2] y) { y = Relu (x) }',
        '<ir_version: 10, opset_import: ["" : 20]> g (float[2] x) => (float[2] y) { y = Relu (x) }',
    ),
    Case(  # ReduceMax whose axes were ignored
        "EP004",
        XAVIER,
        "g (float[2,3] x) => (float[2,1] y) <int64[1] a = {1}> { y = ReduceMax (x, a) }",
        "g (float[2,3] x) => (float[2,1] y) <int64[1] a = {1}> { y = ReduceSum (x, a) }",
    ),
    Case(
        "EP005",
        XAVIER,
        "g (float[N,3] x) => (int64[1] y) { y = Shape <start = 0, end = 1> (x) }".replace(
            "=> (int64[1] y)", "=> (int32[1] y)"
        )
        .replace("y = Shape", "s = Shape")
        .replace("(x) }", "(x) y = Cast <to = 6> (s) }"),
        """g (float[N,3] x) => (int32[1] y) <int64[1] i = {0}> {
             s = Shape (x) t = Gather (s, i) y = Cast <to = 6> (t) }""",
    ),
    Case(
        "EP006",
        ORIN,
        """g (float[4] x, float[1] u) => (float[4] y) <int64[1,1] i = {1}> {
             y = ScatterND <reduction = "add"> (x, i, u) }""",
        """g (float[4] x, float[1] u) => (float[4] y) <int64[1,1] i = {1}> {
             y = ScatterND (x, i, u) }""",
        opset=20,
    ),
    Case(
        "EP007",
        ORIN,
        "g (float[2,3] x, int64[1] a) => (float[N,M] y) { y = ReduceMean (x, a) }",
        """g (float[2,3] x) => (float[2,1] y) {
             a = Constant <value_ints = [1]> () y = ReduceMean (x, a) }""",
        opset=20,
    ),
    Case(
        "EP008",
        XAVIER,
        "g (float[1,1,4,4] x) => (float[1,1,2,2] y, int32[1,1,2,2] i) {"
        " y, j = MaxPool <kernel_shape = [2,2], strides = [2,2]> (x) i = Cast <to = 6> (j) }",
        "g (float[1,1,4,4] x) => (float[1,1,2,2] y) {"
        " y = MaxPool <kernel_shape = [2,2], strides = [2,2]> (x) }",
    ),
    Case(
        "EP009",
        ORIN,
        "g (float[2] x) => (float[2] y) { y = Relu (x) }",
        "g (float[2] x) => (float[2] y) { y = Relu (x) }",
        opset=8,
        good_target=XAVIER,
    ),
    Case(
        "EP010",
        XAVIER,
        qdq("x, s", "DequantizeLinear", zero=""),
        qdq("x, s, z", "DequantizeLinear"),
    ),
    Case("EP011", XAVIER, qdq("x, s, z", zero="int8 z = {3}"), qdq("x, s, z")),
    Case(
        "EP012",
        ORIN,
        qdq("x, s, z", zero="uint8 z = {0}", out="uint8"),
        qdq("x, s, z"),
    ),
    Case(
        "EP013",
        XAVIER,
        "g (float16[2] x) => (int8[2] y) <float f = {0.5}, int8 z = {0}>"
        " { s = Cast <to = 10> (f) y = QuantizeLinear (x, s, z) }",
        "g (float16[2] x) => (int8[2] y) <float s = {0.5}, int8 z = {0}>"
        " { a = Cast <to = 1> (x) y = QuantizeLinear (a, s, z) }",
    ),
    Case(
        "EP014",
        XAVIER,
        qdq("x, s, z").replace("{0.5}", "{0.0}"),
        qdq("x, s, z"),
    ),
    Case(
        "EP015",
        XAVIER,
        STORED_INT8,
        STORED_FLOAT,
    ),
    Case(
        "EP016",
        ORIN,
        "g (float[2] x) => (float[2] y) <int32[2] b = {1,2}, float s = {0.5}>"
        " { d = DequantizeLinear (b, s) y = Add (x, d) }",
        "g (float[2] x) => (float[2] y) <float[2] b = {0.5,1}> { y = Add (x, b) }",
        opset=20,
    ),
    Case(
        "EP017",
        ORIN,
        STORED_FLOAT,
        STORED_INT8,
        opset=20,
    ),
    Case(
        "EP018",
        XAVIER,
        qdq("x, s, z"),
        qdq("x, s, z"),
        options={"calibrator": True},
    ),
    Case(
        "EP019",
        XAVIER,
        "g (float[2,3] x) => (int8[2,3] y) <float[3] s = {1,2,3}, int8[3] z = {0,0,0}>"
        " { y = QuantizeLinear <axis = 1> (x, s, z) }",
        qdq("x, s, z"),
    ),
    Case(
        "EP020",
        ORIN,
        "g (double[2] x) => (float[2] y) { y = Cast <to = 1> (x) }",
        "g (float16[2] x) => (float[2] y) { y = Cast <to = 1> (x) }",
    ),
    Case(  # attention masks of torch.finfo or iinfo
        "EP021",
        XAVIER,
        "g (int32[2] x) => (int32[2] y) <int64 m = {-9223372036854775807}>"
        " { a = Cast <to = 7> (x) b = Max (a, m) y = Cast <to = 6> (b) }",
        "g (float[4] x) => (float[N] y) <int64[1] a = {1}, int64[1] b = {9223372036854775807}>"
        " { y = Slice (x, a, b) }",
    ),
    Case(
        "EP022",
        XAVIER,
        "g (int64[2] x) => (float[2] y) { y = Cast <to = 1> (x) }",
        "g (int32[2] x) => (float[2] y) { y = Cast <to = 1> (x) }",
    ),
    Case(
        "EP023",
        XAVIER,
        "g (float[2] x) => (float[2] y) {"
        " a = Cast <to = 16> (x) b = Relu (a) y = Cast <to = 1> (b) }",
        "g (float[2] x) => (float[2] y) {"
        " a = Cast <to = 10> (x) b = Relu (a) y = Cast <to = 1> (b) }",
    ),
    Case(
        "EP024",
        ORIN,
        "g (float[2] x) => (float[2] y) <float s = {0.5}> {"
        " q = QuantizeLinear <output_dtype = 17> (x, s) c = Cast <to = 17> (x)"
        " y = DequantizeLinear (c, s) }",
        "g (float[2] x) => (float[2] y) <float s = {0.5}> {"
        " c = Cast <to = 17> (x) y = DequantizeLinear (c, s) }",
        good_target=H100,
        opset=20,
    ),
    Case(
        "EP025",
        ORIN,
        "g (int16[2] x) => (float[2] y) { y = Cast <to = 1> (x) }",
        "g (uint8[2] x) => (float[2] y) { y = Cast <to = 1> (x) }",
    ),
    Case(
        "EP030",
        XAVIER,
        "g (float[2,9] x, int32[1] n) => (float[2,K] y) {"
        " k = Cast <to = 7> (n) y, i = TopK (x, k) }",
        "g (float[2,9] x) => (float[2,3] y) <int64[1] k = {3}> { y, i = TopK (x, k) }",
    ),
    Case(
        "EP031",
        ORIN,
        "g (float[2,9000] x) => (float[2,4000] y) <int64[1] k = {4000}> { y, i = TopK (x, k) }",
        "g (float[2,9000] x) => (float[2,3840] y) <int64[1] k = {3840}> { y, i = TopK (x, k) }",
        opset=20,
    ),
    Case(
        "EP032",
        ORIN,
        "g (int8[32768,65536] x) => (int8[32768,65536] y) { y = Identity (x) }",
        "g (int8[32767,65536] x) => (int8[32767,65536] y) { y = Identity (x) }",
        opset=20,
    ),
    Case(
        "EP040",
        ORIN,
        BRANCHES.format(a="float[2] r", an="r", b="float[2] r", two="r = Neg (x)"),
        BRANCHES.format(a="float[2] r", an="r", b="float[2] s", two="s = Neg (x)"),
        opset=20,
    ),
    Case(
        "EP041",
        ORIN,
        BRANCHES.format(
            a="float[2] r",
            an="r",
            b="float[1,2] s",
            two="a = Constant <value_ints = [0]> () s = Unsqueeze (x, a)",
        ),
        BRANCHES.format(a="float[2] r", an="r", b="float[2] s", two="s = Neg (x)"),
        opset=20,
    ),
    Case(
        "EP042",
        ORIN,
        LOOP.format(inits="", count="n"),
        LOOP.format(inits="<int64 k = {3}>", count="k"),
        opset=20,
    ),
    Case(
        "EP043",
        RTX,
        BRANCHES.format(a="float[2] r", an="r", b="float[2] s", two="s = Neg (x)"),
        "g (float[2] x, bool c) => (float[2] y) { a = Relu (x) b = Neg (x) y = Where (c, a, b) }",
        opset=20,
    ),
    Case(
        "EP044",
        ORIN,
        "g (float[4] x) => (int64[1,N] y) { y = NonZero (x) }",
        """g (float[4] x) => (float[2] y) <int64[1] k = {2}> { y, i = TopK (x, k) }""",
        opset=20,
    ),
    Case(
        "EP045",
        ORIN,
        "g (float[6] x, int64[2] s) => (float[N,M] y) { y = Reshape (x, s) }",
        "g (float[6] x, float[N,M] like) => (float[N,M] y) { s = Shape (like) y = Reshape (x, s) }",
        opset=20,
    ),
    Case(
        "EP050",
        ORIN,
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.TopK <{PLUGIN}> (x) }}",
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.PoolTopK <{PLUGIN}> (x) }}",
        opset=20,
        options={"plugins": ["TopK"]},
        good_options={"plugins": ["PoolTopK"]},
    ),
    Case(
        "EP051",
        ORIN,
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.Twice <{PLUGIN}> (x) }}",
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.IndexPool <{PLUGIN}> (x) }}",
        opset=20,
    ),
    Case(
        "EP052",
        ORIN,
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.IndexPool <{PLUGIN}> (x) }}",
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.IndexPool <{PLUGIN}> (x) }}",
        opset=20,
        functions=POOL,
        good_target=ORIN7,
    ),
    Case(
        "EP053",
        XAVIER,
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.IndexPool <{PLUGIN}> (x) }}",
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.IndexPool <{PLUGIN}> (x) }}",
        functions=POOL.replace("20", "17"),
        good_functions="",
    ),
    Case(
        "EP055",
        XAVIER,
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.IndexPool <{PLUGIN}> (x, , x) }}",
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.IndexPool <{PLUGIN}> (x, x, x) }}",
    ),
    Case(
        "EP056",
        ORIN,
        f"g (float[2] x) => (float[2] y) {{"
        f" y = edgepool.IndexPool <n = 2147483648, {PLUGIN}> (x) }}",
        f"g (float[2] x) => (float[2] y) {{"
        f" y = edgepool.IndexPool <n = 2147483647, {PLUGIN}> (x) }}",
        opset=20,
    ),
    Case(
        "EP057",
        ORIN,
        "g (float[2] x) => (float[2] y) { y = edgepool.IndexPool (x) }",
        f"g (float[2] x) => (float[2] y) {{ y = edgepool.IndexPool <{PLUGIN}> (x) }}",
        opset=20,
    ),
    Case(
        "EP060",
        ORIN,
        "g (float[2] s) => (float[2] s_out, float[2] y) { s_out = Relu (s) y = Neg (s) }",
        "g (float[2] s) => (float[2] s_out, float[2] y) { s_out = Relu (s) y = Neg (s_out) }",
        opset=20,
    ),
    Case(
        "EP061",
        ORIN,
        "g (float16[2] s) => (float[2] s_out) { s_out = Cast <to = 1> (s) }",
        "g (float16[2] s) => (float16[2] s_out) { s_out = Relu (s) }",
        opset=20,
    ),
]
