"""The demo: digits.py twice on four ranks, once unbroken and once with two faults, compared.

In the second run one rank is killed and later another one is frozen. It passes when both runs end
with the same parameters, bit for bit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

NUM_RANKS = 4
DRILLS = ("kill:rank=2,step=400", "stop:rank=1,step=900")
HANG_TIMEOUT_S = 2
TIMEOUT_S = 300
HERE = Path(__file__).resolve().parent


def train(title: str, log_dir: str, *options: str) -> dict[str, str]:
    """Runs digits.py and shows what it prints. Returns its last lines, by their first word."""
    command = [
        str(Path(sys.executable).parent / "resilient-run"),
        "--standalone",
        f"--nproc-per-node={NUM_RANKS}",
        f"--log-dir={log_dir}",
        *options,
        str(HERE / "digits.py"),
    ]
    shown = ["resilient-run", *command[1:-1], "examples/digits.py"]
    print(f"\n== {title}\n$ {' '.join(shown)}", flush=True)
    result = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            word, _, value = line.rstrip().partition(" ")
            result[word] = value
        try:
            code = process.wait(TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            raise
    if code != 0:
        sys.exit(f"demo: the run ended with exit code {code}")
    return result


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="resilient-demo-") as directory:
        unbroken = train("unbroken", f"{directory}/unbroken")
        drills = [option for drill in DRILLS for option in ("--inject", drill)]
        broken = train(
            "one rank killed, another one frozen",
            f"{directory}/broken",
            f"--hang-timeout={HANG_TIMEOUT_S}",
            *drills,
        )
        print("\n== report of the second run", flush=True)
        resilient = str(Path(sys.executable).parent / "resilient")
        report = subprocess.run(
            [resilient, "report", f"{directory}/broken"],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        ).stdout
        print(report, flush=True)

    print("== compared")
    for title, run in (("unbroken", unbroken), ("with faults", broken)):
        print(f"{title:12s} accuracy {run.get('accuracy')}  sha256 {run.get('sha256')}")
    if report.count("\nrecovery ") != len(DRILLS):
        sys.exit(f"demo: {len(DRILLS)} recoveries were to be reported")
    if not unbroken.get("sha256") or unbroken["sha256"] != broken.get("sha256"):
        sys.exit("demo: the final parameters differ")
    print(f"equal: {len(DRILLS)} recoveries, and the final parameters are the same, bit for bit")


if __name__ == "__main__":
    main()
