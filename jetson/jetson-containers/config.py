"""edgepool as a package of jetson-containers, on the CUDA, TensorRT and Python that it installs.

It is the image of Dockerfile.jetson: jetson-containers gives it what it has built so far as
BASE_IMAGE. Its loader sets `package` before it runs this file.
"""

# ruff: noqa: F821  `package` is a global that the loader made
from pathlib import Path

from jetson_containers import PYTHON_VERSION

REQUIREMENTS = {"3.8": "jp5", "3.10": "jp6", "3.11": "jp7", "3.12": "jp7"}
GPUS = {"jp5": "72-real,87-real", "jp6": "87-real", "jp7": "87-real"}

python = str(PYTHON_VERSION)
if python not in REQUIREMENTS:
    package["disabled"] = True
else:
    package.update(
        name="edgepool",
        group="llm",
        notes="long-context language models on TensorRT",
        depends=["python", "cuda", "tensorrt"],
        requires=[">=35"],
        path=str(Path(__file__).resolve().parents[2]),
        dockerfile="Dockerfile.jetson",
        build_args={
            "PYTHON": python,
            "REQUIREMENTS": REQUIREMENTS[python],
            "ARCHITECTURES": GPUS[REQUIREMENTS[python]],
            # whatever jetson-containers has installed
            "CUDA": "",
            "TENSORRT": "",
        },
    )
