"""`make test-full`: runs every test and records the run in docs/verification.md."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "docs" / "verification.md"
MARK = "| --- | --- | --- | --- | --- | --- | --- | --- |\n"  # under the headings of "Full runs"


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", "2", "-q", "--durations", "10"]
        command += ["--hypothesis-profile", "full"]
        code = subprocess.run([*command, "--junitxml", report, *sys.argv[1:]], cwd=ROOT).returncode
        suite = ElementTree.parse(report).getroot()[0]
    counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
    failed = counts["failures"] + counts["errors"]
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    row = (
        datetime.date.today().isoformat(),
        subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip(),
        "%s, %d cores, Python %s"
        % (platform.machine(), os.cpu_count() or 0, platform.python_version()),
        " ".join(sys.argv[1:]) or "all",
        str(counts["tests"] - failed - counts["skipped"]),
        str(failed),
        str(counts["skipped"]),
        "%.0f s" % float(suite.get("time", "0")),
    )
    text = RECORD.read_text()
    RECORD.write_text(text.replace(MARK, MARK + "| %s |\n" % " | ".join(row), 1))
    print("recorded in %s: %s" % (RECORD.relative_to(ROOT), ", ".join(row)))
    return code


if __name__ == "__main__":
    sys.exit(main())
