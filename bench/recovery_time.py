"""SIGKILL of one of four ranks to the next committed step: resilient-run against torchrun.

Both run the same training and lose rank 2 at the beginning of step 40. Measured from just before
the kill to the moment a rank has committed a step that was not committed before, on the clock that
all processes share. torchrun gets what it needs: a checkpoint on every step, restarts, and the
setting without which its restarts read the keys of the attempt before. Runs alternate, so that a
busy moment of the machine meets both. The last line is `ratio R`: torchrun's median over ours.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path

from common import WORKLOAD, command_of, logged_steps, remove, run

from resilient.report import find_journal, read_journal, summarize

NUM_RANKS = 4
KILL_STEP = 40


def measured_s(out: Path) -> float:
    """From the kill to the first commit of a step beyond those that were committed before it."""
    killed_ns = int((out / "killed").read_text())
    steps = logged_steps(out)
    after = [step.ns for step in steps if step.ns > killed_ns and step.num_steps > KILL_STEP]
    if not after:
        raise SystemExit(f"{out}: no step was committed after the kill")
    return (min(after) - killed_ns) / 1e9


def run_ours(out: Path) -> tuple[float, dict[str, float]]:
    """Returns the time, and the phases by name, in seconds."""
    command = [*command_of("resilient-run"), f"--nproc-per-node={NUM_RANKS}"]
    command += [f"--log-dir={out / 'logs'}", str(WORKLOAD), "--mode=decorated", f"--out={out}"]
    run([*command, f"--kill-step={KILL_STEP}"], out)
    (recovery,) = summarize(read_journal(find_journal(str(out / "logs")))).recoveries
    phases = {name: span_s for name, span_s in recovery.phases.items() if span_s is not None}
    total_s = measured_s(out)
    seen_s = sum(span_s for name, span_s in phases.items() if name != "detect")
    phases["detect"] = max(0.0, total_s - seen_s)  # the kill came from the rank itself
    return total_s, phases


def run_torchrun(out: Path) -> float:
    command = [*command_of("torchrun"), f"--nproc-per-node={NUM_RANKS}", "--max-restarts=3"]
    command += [str(WORKLOAD), "--mode=plain", "--checkpoint", f"--out={out}"]
    run(
        [*command, f"--kill-step={KILL_STEP}"],
        out,
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
    )
    return measured_s(out)


def spread(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"median {statistics.median(values):.3f} s (min {low:.3f}, max {high:.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20, help="of each (default: 20)")
    num_runs = parser.parse_args().runs
    ours: list[float] = []
    theirs: list[float] = []
    phases: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="resilient-bench-") as directory:
        for number in range(num_runs):
            out = Path(directory, f"ours-{number}")
            total_s, parts = run_ours(out)
            ours.append(total_s)
            for name, span_s in parts.items():
                phases.setdefault(name, []).append(span_s)
            remove(out)
            out = Path(directory, f"torchrun-{number}")
            theirs.append(run_torchrun(out))
            remove(out)
            print(
                f"run {number + 1:2d} of {num_runs}: resilient-run {ours[-1]:.3f} s, "
                f"torchrun {theirs[-1]:.3f} s",
                flush=True,
            )
    print(f"\nSIGKILL of one of {NUM_RANKS} ranks at step {KILL_STEP} to the next committed step")
    print(f"resilient-run  {spread(ours)}")
    print(f"torchrun       {spread(theirs)}")
    print("phases of resilient-run, medians in ms:")
    for name in ("detect", "fence", "agree", "communicate", "restore", "first step"):
        if name in phases:
            print(f"  {name:12s} {statistics.median(phases[name]) * 1000:7.1f}")
    print(f"ratio {statistics.median(theirs) / statistics.median(ours):.1f}")


if __name__ == "__main__":
    main()
