"""One seed, one life of a cluster, one result.

python -m resilient.sim.run SEED      prints the trace of one seed and what came of it
"""

from __future__ import annotations

import hashlib
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resilient.core.model import Outcome
from resilient.sim.checkers import CheckFailed
from resilient.sim.cluster import Cluster
from resilient.sim.faults import Fault, Settings, draw, settings


@dataclass(frozen=True)
class Violation:
    """A promise that was broken. checker: its name; "exception" where the code under test raised.

    time_s: of the simulation.
    """

    checker: str
    text: str
    time_s: float


@dataclass(frozen=True)
class Result:
    """What came of a run.

    Attributes:
        num_generations: plans that were published.
        violation: None: every promise was kept.
        trace: one line a happening: time, who, what.
        trace_hash: of all its lines; equal for equal runs, in any process.
    """

    seed: int
    outcome: Outcome | None
    num_generations: int
    faults: tuple[Fault, ...]
    sim_s: float
    violation: Violation | None
    trace: tuple[str, ...]
    trace_hash: str


def run(
    seed: int,
    *,
    num_nodes: int = 8,
    trace: Callable[[str], None] | None = None,
    faults: Sequence[Fault] | None = None,
    chosen: Settings | None = None,
) -> Result:
    """One run.

    Args:
        trace: called with each line at the end of the run.
        faults: instead of those of the seed; all else stays the seed's.
        chosen: instead of the seed's cluster and job.
    """
    struck = tuple(faults) if faults is not None else draw(seed, num_nodes)
    cluster = Cluster(seed, chosen or settings(seed, num_nodes), struck)
    violation = None
    try:
        cluster.run(bound_s(cluster.settings))
    except CheckFailed as failed:
        violation = Violation(failed.checker, failed.text, failed.time_s)
    except Exception:
        violation = Violation("exception", traceback.format_exc(), cluster.timeline.now_s)
    if violation is not None:
        cluster.note("violation", f"{violation.checker}: {violation.text}")
    lines = tuple(cluster.trace)
    if trace is not None:
        for line in lines:
            trace(line)
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    closed = cluster.store.closed
    return Result(
        seed,
        closed.outcome if closed is not None else None,
        len(cluster.checks.plans),
        struck,
        cluster.timeline.now_s,
        violation,
        lines,
        digest,
    )


def bound_s(chosen: Settings) -> float:
    """From the heal to the end: two recoveries that run into each bound once, after the leases of
    the lost have ended, and the steps that are left."""
    config = chosen.config
    recovery_s = (
        2 * chosen.ttl_s
        + config.orphan_timeout_s
        + config.quorum_timeout_s
        + chosen.hang_timeout_s
        + chosen.group_timeout_s
        + max(config.interrupt_timeout_s, 9 * chosen.step_s)
        + config.last_holder_timeout_s
        + 2 * config.kill_timeout_s
        + config.rendezvous_timeout_s
        + config.start_timeout_s
        + config.last_call_s
        + config.grow_delay_s
    )
    return 2 * recovery_s + 2 * config.grace_s + 200 * 3 * chosen.step_s


if __name__ == "__main__":
    result = run(int(sys.argv[1]), trace=print)
    print(result.outcome, result.num_generations, f"{result.sim_s:.1f} s", result.trace_hash)
    sys.exit(1 if result.violation else 0)
