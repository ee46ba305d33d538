"""What scripts/board_check.sh found, as the rows of docs/verification.md that nobody had run.

    python scripts/board_report.py LOG BACKEND

LOG is the folder that the script wrote: `steps`, a line `NAME CODE SECONDS` for each step, and what
each printed in NAME.out (one JSON object, but for `kernels`) and NAME.err. A row of the table `Not
run` is filled in by the step that it names as `scripts/board_check.sh` (STEP). Exit code: 1 where a
step failed, 3 where the machine lacks what a step needs, else 0.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple

PAGE = Path(__file__).resolve().parents[1] / "docs" / "verification.md"
STEP = re.compile(r"`scripts/board_check\.sh` \((\w+)\)")
OUTCOMES = {0: "passed", 3: "not run"}
OF_THE_MACHINE = ("board", "JetPack", "GPU", "CUDA", "TensorRT", "power mode", "memory")


class Step(NamedTuple):
    """outcome: passed, failed or not run; found: in words."""

    name: str
    outcome: str
    seconds: int
    found: str


def main(log: Path, backend: str) -> int:
    steps = [read_step(log, *line.split()) for line in (log / "steps").read_text().splitlines()]
    print("| step | outcome | s | found |\n| --- | --- | --- | --- |")
    for step in steps:
        print("| %s | %s | %d | %s |" % step)
    print()
    if backend != "trt":
        print("This was a rehearsal on ONNX Runtime: it shows nothing of a GPU.")
    else:
        print("| claim | outcome | found |\n| --- | --- | --- |")
        for row in filled_in(PAGE.read_text(encoding="utf-8"), {s.name: s for s in steps}):
            print("| %s |" % " | ".join(row))
    outcomes = {step.outcome for step in steps}
    return 1 if "failed" in outcomes else 3 if "not run" in outcomes else 0


def read_step(log: Path, name: str, code: str, seconds: str) -> Step:
    """What a step found; of one that did not pass, its error."""
    outcome = OUTCOMES.get(int(code), "failed")
    out = (log / (name + ".out")).read_text(encoding="utf-8", errors="replace")
    if name == "kernels" and outcome == "passed" and not re.search(r"\d+ passed", out):
        outcome = "not run"  # pytest passes where all is skipped
    if outcome == "passed" or name == "doctor":
        found = cell(WORDS[name](out))
    else:
        said = (log / (name + ".err")).read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in said if line.startswith("error:")] or said or out.splitlines()
        found = cell(errors[-1] if errors else "exit code " + code)
    return Step(name, outcome, int(seconds), found)


def filled_in(page: str, steps: Dict[str, Step]) -> List[List[str]]:
    """Claim, outcome and what was found, for each row of `Not run` that names a step."""
    section = page.split("\n## Not run\n", 1)[1].split("\n## ", 1)[0]
    rows = []
    for line in section.splitlines():
        cells = [text.strip() for text in line.strip("| ").split(" | ")]
        named = STEP.search(cells[-1])
        if named and named.group(1) in steps:
            step = steps[named.group(1)]
            rows.append([cells[0], step.outcome, "%s: %s" % (step.name, step.found)])
    return rows


def cell(text: str) -> str:
    """Text that can stand in a table."""
    return " ".join(text.replace("|", "/").split())


def machine(out: str) -> str:
    lines = {line["name"]: line for line in json.loads(out)["lines"]}
    names = [name for name in OF_THE_MACHINE if name in lines]
    return "; ".join("%s %s" % (name, lines[name]["found"]) for name in names)


def plugins(out: str) -> str:
    record = json.loads(out)
    return "compiled against TensorRT %s with CUDA %s" % (record["tensorrt"], record["cuda"])


def kernels(out: str) -> str:
    return [line for line in out.splitlines() if re.search(r"\d+ passed", line)][-1].strip("= ")


def check(out: str) -> str:
    lines = {line["name"]: line["found"] for line in json.loads(out)["lines"]}
    return "; ".join(
        "%s: %s" % (name, lines[name]) for name in ("engine", "parity") if name in lines
    )


def build(out: str) -> str:
    record = json.loads(out)
    chosen = "%s, %d tokens, batch %d" % (record["precision"], record["context"], record["batch"])
    parity = record["parity"]
    return "%s; parity: %.1f %% of %d best tokens are PyTorch's, logits within %.2g" % (
        chosen,
        100 * parity["agreement"],
        parity["positions"],
        parity["largest"],
    )


def bench(out: str) -> str:
    record = json.loads(out)
    speeds = [
        "%d tokens: prefill %.1f/s, decode %.1f/s"
        % (speed["context"], speed["prefill_tokens_per_s"], speed["decode_tokens_per_s"])
        for speed in record["speeds"]
    ]
    return "%s; %s" % (record["precision"], "; ".join(speeds))


def run(out: str) -> str:
    return "%r" % json.loads(out)["text"]


WORDS: Dict[str, Callable[[str], str]] = {
    "doctor": machine,
    "plugins": plugins,
    "kernels": kernels,
    "check": check,
    "build": build,
    "bench": bench,
    "run": run,
}

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
