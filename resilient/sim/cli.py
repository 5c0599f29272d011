"""`resilient sim run`: one simulated job a seed, each judged by the checkers.

A seed is all that a run depends on, so the line of a failure names the command that repeats it.
Here, and nowhere else in the simulator, is a clock (how long it took) and are processes (`--jobs`):
what they do has no way into a run.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from resilient.errors import ConfigError
from resilient.sim.run import Result, run
from resilient.sim.show import show
from resilient.sim.shrink import shrink

DEFAULT_SEEDS = "0:100"
DEFAULT_NUM_NODES = 8
MAX_SEEDS_AT_ONCE = 16
MAX_SEEDS = 10_000_000
MAX_JOBS = 256

Simulate = Callable[..., Result]
"""`sim.run.run` for a cluster of some size: (seed), and faults= for these faults only."""


@dataclass(frozen=True)
class Verdict:
    """What is told of one run; small, since it may come from another process.

    Attributes:
        outcome: of the job, by its value; what it was doing where it has not ended.
        checker: whose promise was broken; None: every promise was kept.
        text: what was seen, in one line.
        trace: where it was asked for.
    """

    seed: int
    outcome: str
    sim_s: float
    trace_hash: str
    checker: str | None = None
    text: str = ""
    trace: tuple[str, ...] = ()


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "run",
        help="simulated clusters under random faults; prints what fails and how to repeat it",
        description="Runs one simulated job for each seed, and prints those that break a promise. "
        "The summary counts how the jobs ended: an end that is justified by what struck, "
        "unrecoverable too, is no failure.",
        epilog="Exit code: 0 every promise was kept; 1 one was broken; "
        "2 the command line is wrong.",
    )
    seeds = parser.add_mutually_exclusive_group()
    seeds.add_argument(
        "--seeds",
        metavar="FIRST:END",
        type=_seeds,
        default=_seeds(DEFAULT_SEEDS),
        help=f"END is not included; or a single seed (default: {DEFAULT_SEEDS})",
    )
    seeds.add_argument("--seed", metavar="N", type=_seeds, dest="seeds", help="a single one")
    parser.add_argument(
        "--nodes",
        metavar="N",
        type=int,
        default=DEFAULT_NUM_NODES,
        help=f"of the simulated cluster (default: {DEFAULT_NUM_NODES})",
    )
    parser.add_argument(
        "--jobs", metavar="N", type=int, default=1, help="processes at once (default: 1)"
    )
    parser.add_argument("--trace", action="store_true", help="print everything; of a single seed")
    parser.add_argument("--hash", action="store_true", help="print each seed's trace hash")
    parser.add_argument(
        "--shrink", action="store_true", help="look for the fewest faults that still fail"
    )
    parser.set_defaults(command=_run)


def _seeds(text: str) -> range:
    """ "7" or "0:500"."""
    first, colon, end = text.partition(":")
    try:
        seeds = range(int(first), int(end) if colon else int(first) + 1)
    except ValueError:
        seeds = range(0)
    if not seeds or seeds[0] < 0:
        raise argparse.ArgumentTypeError(f"no seeds in {text!r}: give N, or FIRST:END")
    if seeds[-1] - seeds[0] >= MAX_SEEDS:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_SEEDS} seeds")
    return seeds


def _run(arguments: argparse.Namespace) -> int:
    seeds: range = arguments.seeds
    if arguments.nodes < 1 or arguments.jobs < 1:
        raise ConfigError("--nodes and --jobs must be at least 1")
    if arguments.trace and len(seeds) > 1:
        raise ConfigError("--trace is for a single seed: give --seed N")
    simulate = functools.partial(run, num_nodes=arguments.nodes)
    began_s = time.monotonic()
    verdicts: list[Verdict] = []
    try:
        for verdict in _verdicts(simulate, seeds, arguments.jobs, arguments.trace):
            verdicts.append(verdict)
            if arguments.trace:
                print("\n".join(verdict.trace))
            if arguments.hash:
                print(f"{verdict.seed} {verdict.trace_hash}", flush=True)
            if verdict.checker is not None:
                print(_failure_text(verdict, arguments.nodes), flush=True)
                if arguments.shrink:
                    print(_shrunk_text(simulate, verdict.seed), flush=True)
        if arguments.shrink and not _num_failed(verdicts):
            print("every promise was kept: there is nothing to shrink")
        print(_summary_text(verdicts, time.monotonic() - began_s))
    except BrokenPipeError:
        pass  # nobody reads on: what is known by now is the result
    return 1 if _num_failed(verdicts) else 0


def _num_failed(verdicts: Sequence[Verdict]) -> int:
    return sum(verdict.checker is not None for verdict in verdicts)


def _verdicts(simulate: Simulate, seeds: range, num_jobs: int, trace: bool) -> Iterator[Verdict]:
    """In the order of the seeds, whoever is done first."""
    judge = functools.partial(_judge, simulate, trace=trace)
    if num_jobs == 1 or len(seeds) == 1:
        yield from map(judge, seeds)
        return
    at_once = max(1, min(MAX_SEEDS_AT_ONCE, len(seeds) // (4 * num_jobs)))
    with ProcessPoolExecutor(min(num_jobs, MAX_JOBS, len(seeds))) as pool:
        yield from pool.map(judge, seeds, chunksize=at_once)


def _judge(simulate: Simulate, seed: int, *, trace: bool) -> Verdict:
    result = simulate(seed)
    outcome = "not ended" if result.outcome is None else result.outcome.value
    shown = tuple(result.trace) if trace else ()
    verdict = Verdict(seed, outcome, result.sim_s, result.trace_hash, trace=shown)
    if result.violation is None:
        return verdict
    seen = result.violation.text.strip().splitlines() or [""]
    text = f"{seen[-1]}, at {result.violation.time_s:.3f} s"  # the last line of a traceback says it
    return replace(verdict, checker=result.violation.checker, text=text)


# ---------------------------------------------------------------- texts


def _failure_text(verdict: Verdict, num_nodes: int) -> str:
    return (
        f"seed {verdict.seed}: {verdict.checker}: {verdict.text}; "
        f"repeat: {repeat_command(verdict.seed, num_nodes)}"
    )


def repeat_command(seed: int, num_nodes: int) -> str:
    return f"resilient sim run --seed {seed} --nodes {num_nodes} --trace"


def _shrunk_text(simulate: Simulate, seed: int) -> str:
    whole = simulate(seed)
    shrunk = shrink(simulate, seed, whole)
    head = f"fewest faults found: {len(shrunk.faults)} of {len(whole.faults)}"
    faults = [f"  {show(fault)}" for fault in shrunk.faults]
    return "\n".join([head, *faults, "trace with these:", *(f"  {t}" for t in shrunk.trace)])


def _summary_text(verdicts: Sequence[Verdict], wall_s: float) -> str:
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    sim_s = sum(verdict.sim_s for verdict in verdicts)
    return (
        f"{len(verdicts)} {'seed' if len(verdicts) == 1 else 'seeds'}: "
        f"{_num_failed(verdicts)} failed; "
        f"{sim_s:.0f} s simulated in {wall_s:.1f} s; {told}"
    )
