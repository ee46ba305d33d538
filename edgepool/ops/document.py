"""Write export/opset.md, the description of the operators, from their schemas.

python -m edgepool.ops.document          write it
python -m edgepool.ops.document --check  exit code 1 where it is stale
"""

from __future__ import annotations

import sys
from collections.abc import Iterable

from edgepool import resources

from .registry import DOMAIN, VERSION, Argument, Operator, operators
from .schema import CONSTRAINTS

HEAD = f"""\
# Operators: domain `{DOMAIN}`, version {VERSION}

Written by `python -m edgepool.ops.document` from the schemas in `edgepool/ops`; edit those.

* Shapes: B sequences, S rows (new tokens) per sequence, NP physical pages with the null page,
  MP columns of the page table, T tokens and U = T / ratio pools per page, Hs selection heads,
  Hq index queries per selection head, Di their size, H query heads, Hkv key and value heads, D
  their size, K or k selected blocks. B, S, MP and NP may change from call to call.
* Every input and attribute is present. A tensor that a mode does not use is a constant of shape
  [1], and its state output is that constant.
* Row s of sequence b is the token at position past_len[b] + s; rows at or after new_len[b] are
  padding: their outputs are 0 and their selections -1. new_len may be 0.
* Position p is in logical page p // T. A page-table entry of 0, and a position beyond the table,
  have no page: what falls there is not stored and not seen. Physical page 0, the null page, holds
  zeros and stays so. All other pages must hold finite values, those without an owner too.
* State outputs (`<input>_out`) may be bound to the buffers of their inputs.
* INT8 storage has one float32 scale per vector, amax / 127; codes are x / scale, rounded half to
  even; both divisions are IEEE. A zero vector has scale 0; a vector that is not finite reads back
  as NaN.
* Arithmetic is float32 whatever T is.
"""


def document() -> str:
    """The text of export/opset.md."""
    types = [f"* `{name}`: {', '.join(sorted(kinds))}: {text}" for name, kinds, text in CONSTRAINTS]
    parts = [HEAD, "Types:\n", "\n".join(types), ""]
    parts += [_section(x) for x in operators().values()]
    return "\n".join(parts)


def _section(operator: Operator) -> str:
    attributes = (
        (f"`{x.name}`", x.kind.__name__, _choices(x.choices) + x.text) for x in operator.attributes
    )
    return "\n".join(
        [
            f"## {operator.name}\n",
            f"{operator.text}\n",
            _table(("input", "type", "shape", ""), map(_row, operator.inputs)),
            _table(("output", "type", "shape", ""), map(_row, operator.outputs)),
            _table(("attribute", "type", ""), attributes),
        ]
    )


def _row(argument: Argument) -> tuple[str, ...]:
    shape = ", ".join(str(x) for x in argument.shape)
    unused = f" Not used with {argument.unused}." if argument.unused else ""
    return f"`{argument.name}`", argument.type, f"[{shape}]", argument.text + unused


def _choices(choices: tuple[str, ...]) -> str:
    return ", ".join(f"`{x}`" for x in choices) + ": " if choices else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *map(list, rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> int:
    path = resources.resource("export") / "opset.md"
    if "--check" in sys.argv[1:]:
        return int(path.read_text(encoding="utf-8") != document())
    path.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
