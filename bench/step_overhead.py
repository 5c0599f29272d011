"""What a healthy step costs more than with plain DDP under torchrun.

Two numbers. *Own cost*: the decorated loop of one process without an agent against the same loop
written plainly, in microseconds of processor time a step. *Against torchrun*: both launchers on the
same training, at steps of 5 and 50 ms. A step's length is made by sleeping, not by computing: on a
machine with fewer cores than ranks arithmetic would measure the scheduler, while whatever we add is
added to a sleep in full. Runs alternate; a run counts by its median step, the first ones left out.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
from pathlib import Path

from common import WORKLOAD, Step, command_of, logged_steps, remove, run

WARMUP_STEPS = 20
TARGET = 0.01


def wall_times_s(steps: list[Step]) -> list[float]:
    """Durations of the steps, by the slowest rank's log: all ranks step together."""
    times: dict[int, int] = {}
    for step in steps:
        times[step.num_steps] = max(step.ns, times.get(step.num_steps, 0))
    ordered = [times[step] for step in sorted(times)][WARMUP_STEPS:]
    return [(after - before) / 1e9 for before, after in itertools.pairwise(ordered)]


def processor_times_s(steps: list[Step]) -> list[float]:
    """Of the one process there is. What else the machine does hardly shows in it."""
    ordered = [step.processor_ns for step in steps][WARMUP_STEPS:]
    return [(after - before) / 1e9 for before, after in itertools.pairwise(ordered)]


def median_step_s(
    mode: str, directory: str, name: str, num_steps: int, pause_ms: float, num_ranks: int
) -> float:
    out = Path(directory, name)
    arguments = [str(WORKLOAD), f"--mode={mode}", f"--out={out}"]
    arguments += [f"--steps={num_steps}", f"--pause-ms={pause_ms}"]
    if num_ranks == 0:
        command = [sys.executable]
    else:
        launcher = "resilient-run" if mode == "decorated" else "torchrun"
        command = [*command_of(launcher), f"--nproc-per-node={num_ranks}"]
        command += [f"--log-dir={out / 'logs'}"] if mode == "decorated" else []
    run([*command, *arguments], out)
    times_s = wall_times_s if num_ranks else processor_times_s
    median_s = statistics.median(times_s(logged_steps(out)))
    remove(out)
    return median_s


def compare(
    title: str, directory: str, num_runs: int, num_steps: int, pause_ms: float, num_ranks: int
) -> None:
    """num_ranks 0: single processes, without a launcher."""
    ours: list[float] = []
    theirs: list[float] = []
    for number in range(num_runs):
        for mode, found in (("decorated", ours), ("plain" if num_ranks else "bare", theirs)):
            name = f"{mode}-{pause_ms:g}-{num_ranks}-{number}"
            found.append(median_step_s(mode, directory, name, num_steps, pause_ms, num_ranks))
    ours_s, theirs_s = statistics.median(ours), statistics.median(theirs)
    more_s = ours_s - theirs_s
    print(
        f"{title}: decorated {ours_s * 1000:.3f} ms, plain {theirs_s * 1000:.3f} ms a step: "
        f"{more_s * 1e6:+.0f} µs, {more_s / theirs_s:+.2%}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5, help="of each (default: 5)")
    parser.add_argument("--ranks", type=int, default=2, help="default: 2")
    args = parser.parse_args()
    print(f"medians of {args.runs} runs each; to reach: under {TARGET:.0%}")
    with tempfile.TemporaryDirectory(prefix="resilient-bench-") as directory:
        compare("own cost, processor time of one process", directory, args.runs, 1000, 0.0, 0)
        for pause_ms, num_steps in ((5.0, 600), (50.0, 120)):
            title = f"{args.ranks} ranks, {pause_ms:g} ms steps"
            compare(title, directory, args.runs, num_steps, pause_ms, args.ranks)


if __name__ == "__main__":
    main()
