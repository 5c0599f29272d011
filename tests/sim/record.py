"""A real job of which one rank is killed, and its journal with nothing of the machine in it.

    python -m tests.sim.record        writes testdata/killed_rank.jsonl anew

Do that when the core is meant to decide otherwise than it did in the recorded job, after having
looked at each difference (`resilient sim replay` shows them).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from resilient.report.journal import find_journal

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "tests" / "recovery" / "train_script.py"
RECORDED = Path(__file__).parent / "testdata" / "killed_rank.jsonl"
JOB_TIMEOUT_S = 100


def run_job(directory: Path) -> Path:
    """Three ranks, twelve steps; rank 1 is killed in step 5. Returns the journal's path."""
    command = [sys.executable, "-m", "resilient_run.cli", "--standalone", "--nproc-per-node=3"]
    command += [f"--log-dir={directory / 'logs'}", "--inject=kill:rank=1,step=5"]
    command += [str(TRAIN), "--out", str(directory), "--steps=12"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    done = subprocess.run(
        command,
        env={**environment, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=JOB_TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    return Path(find_journal(str(directory / "logs")))


def scrub(line: str, node: str) -> str:
    """The line without command lines, paths, tracebacks and the name of the machine."""
    value = _scrubbed(json.loads(line), node)
    if "argv" in value:
        value |= {"argv": ["resilient-run", "train.py"], "start_unix_s": 0.0}
    return json.dumps(value, separators=(",", ":"))


def _scrubbed(value: Any, node: str) -> Any:
    if isinstance(value, dict):
        return {key: "" if key == "text" else _scrubbed(value[key], node) for key in value}
    if isinstance(value, list):
        return [_scrubbed(item, node) for item in value]
    if isinstance(value, str):
        named = re.sub(rf"\b{re.escape(node)}\b", "node-0", value)
        return re.sub(r"(/[^/\s]+)+/", "", named)
    return value


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        lines = run_job(Path(directory)).read_text().splitlines()
    node = json.loads(lines[1])["event"]["node"]
    RECORDED.write_text("".join(f"{scrub(line, node)}\n" for line in lines))
    print(f"{RECORDED}: {len(lines)} lines")


if __name__ == "__main__":
    main()
