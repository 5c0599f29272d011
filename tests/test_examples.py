"""The example runs as it stands, alone and under the launcher. `make demo` does the rest."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAUNCHED = ("-m", "resilient_run.cli", "--standalone", "--nproc-per-node=2")


@pytest.mark.parametrize("launcher", [(), LAUNCHED], ids=["alone", "two ranks"])
def test_digits(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    pytest.importorskip("sklearn", reason="the example's data set comes with scikit-learn")
    log_dir = (f"--log-dir={tmp_path}",) if launcher else ()
    arguments = ("examples/digits.py", "--epochs=4", "--evaluate-every=2")
    path = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
    done = subprocess.run(
        [sys.executable, *launcher, *log_dir, *arguments],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    evaluations = re.findall(r"^step +(\d+)  accuracy 0\.\d{4}$", done.stdout, re.M)
    assert evaluations == ["44", "88"]
    (accuracy,) = re.findall(r"^accuracy (0\.\d{4})$", done.stdout, re.M)
    assert float(accuracy) > 0.5
    assert len(re.findall(r"^sha256 [0-9a-f]{64}$", done.stdout, re.M)) == 1
