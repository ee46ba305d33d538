"""The last ONNX Runtime for Python 3.8, the one of JetPack 5, runs the portable graph too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edgepool.bundle import Bundle
from edgepool.checkpoint import load
from edgepool.exporter import parity
from edgepool.exporter.schedule import plan
from edgepool.model import Model, new_state
from tests.environments import python_3_8, python_with

REQUIREMENTS = ("onnxruntime==1.19.2", "numpy<2")

# Runs steps over one state: argv is the model, then for every step an .npz with its inputs; writes
# the outputs of each to <step>.out.npz. It needs nothing but ONNX Runtime and NumPy.
SCRIPT = """
import sys
import numpy as np
import onnxruntime as ort

assert ort.__version__ == "1.19.2", ort.__version__
options = ort.SessionOptions()
options.intra_op_num_threads = 1
session = ort.InferenceSession(sys.argv[1], options, providers=["CPUExecutionProvider"])
state = {}
for path in sys.argv[2:]:
    inputs = {**dict(np.load(path)), **state}
    names = [value.name for value in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, inputs)))
    np.savez(path.replace(".npz", ".out.npz"), **outputs)
    state = {name[: -len("_out")]: x for name, x in outputs.items() if name.endswith("_out")}
"""


@pytest.mark.parametrize("kind", ["sparse", "mixed"])
def test_onnxruntime_1_19(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    folder = request.getfixturevalue(kind)
    bundle = Bundle.open(folder / "edgepool-bundle")
    model = Model.from_checkpoint(load(folder / "model.pt"))
    schedule = plan(bundle.config, [], decode=3)
    state = new_state(bundle.config, len(schedule.prompts), schedule.pages)
    names = model.state_names
    references = list(parity.reference_steps(model, schedule))
    paths = []
    for i, reference in enumerate(references):
        values = parity.step_inputs(schedule, reference.step)
        if i == 0:
            values.update(zip(names, (x.numpy() for x in state)))
        paths.append(str(tmp_path / f"{i}.npz"))
        np.savez(paths[-1], **values)
    python = python_with(*REQUIREMENTS, interpreter=python_3_8() or sys.executable)
    done = subprocess.run(
        [python, "-c", SCRIPT, bundle.model_path, *paths], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    limit = 1e-3 if kind == "sparse" else 0.5  # INT8 pages drift: test_export.py
    for path, reference in zip(paths, references):
        got = np.load(path.replace(".npz", ".out.npz"))["logits"]
        real = reference.step.real
        assert np.abs(got - reference.logits)[real].max() <= limit
