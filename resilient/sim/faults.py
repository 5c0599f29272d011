"""What goes wrong in a run, and what kind of cluster it goes wrong in: plain data, from a seed.

A run is a swarm: it switches on a few kinds of fault, with rates of its own, so that some runs are
all partitions and others all dying leaders (Groce et al., "Swarm Testing", 2012). The list of a
run's faults is drawn before it begins and names its targets by index, so that a failing run can be
repeated with fewer of them and the rest still mean the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from resilient.core.model import Config

HURT_S = 300.0
"""Faults strike before this time; then everything heals."""

PHASES = ("stopping", "collecting", "restoring", "takeover", "publishing")
"""What a fault may wait for: a phase of a recovery, a new leader, a plan on its way."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        at_s: when it strikes; with `when`, from when on it waits for that.
        node: index of the node it strikes; kinds that strike the leader ignore it.
        slot: index of the slot on it.
        duration_s: of what lasts; a node that is lost comes back after it.
        arg: what else the kind needs (an exit status, a set of nodes as bits, another node).
        when: one of PHASES, or "".
    """

    kind: str
    at_s: float
    node: int = 0
    slot: int = 0
    duration_s: float = 0.0
    arg: int = 0
    when: str = ""


WORKER_KINDS = ("crash", "hang", "stop", "raise", "collective", "slow", "unkillable")
NODE_KINDS = ("power", "panic", "rename", "pause", "flap", "leave", "leader", "burst")
NETWORK_KINDS = (
    "outage",
    "compact",
    "requests",
    "answers",
    "cutoff",
    "split",
    "orphans",
    "datacut",
    "delay",
)
START_KINDS = ("badstart", "slowstart", "stuckstart")
KINDS = (*WORKER_KINDS, *NODE_KINDS, *NETWORK_KINDS, *START_KINDS, "health")
ENDING_KINDS = ("drain", "bug")
"""These end the job: at most one of them in a run, and seldom."""

_TRIGGERED = ("crash", "hang", "power", "panic", "pause", "leader", "cutoff", "answers", "outage")
"""Kinds that may wait for a phase."""


def draw(seed: int, num_nodes: int) -> tuple[Fault, ...]:
    """The faults of that seed, by time."""
    rng = Random(f"{seed}/faults")
    kinds = rng.sample(KINDS, rng.choice([1, 2, 3, 5, 8]))
    gap_s = rng.choice([5.0, 12.0, 30.0, 60.0])
    triggered = rng.choice([0.0, 0.3, 0.6])
    faults = []
    at_s = rng.uniform(1.0, 2 * gap_s)
    while at_s < HURT_S:
        faults.append(_one(rng, rng.choice(kinds), at_s, num_nodes, triggered))
        at_s += rng.expovariate(1 / gap_s)
    if rng.random() < 0.2:
        kind = rng.choice(ENDING_KINDS)
        faults.append(_one(rng, kind, rng.uniform(20.0, HURT_S), num_nodes, triggered))
    return tuple(sorted(faults, key=lambda fault: (fault.at_s, fault.kind)))


def _one(rng: Random, kind: str, at_s: float, num_nodes: int, triggered: float) -> Fault:
    durations = {
        "slow": [5.0, 30.0],
        "power": [2.0, 15.0, 60.0, HURT_S],
        "panic": [2.0, 15.0, 60.0, HURT_S],
        "rename": [2.0, 15.0, 60.0],
        "pause": [0.5, 3.0, 8.0, 12.0, 25.0, 70.0],
        "flap": [3.0, 8.0],
        "leave": [5.0, 60.0, HURT_S],
        "leader": [0.0, 2.0, 15.0, 60.0],
        "burst": [5.0, 60.0],
        "outage": [1.0, 5.0, 20.0, 60.0],
        "compact": [3.0, 12.0],
        "requests": [1.0, 8.0, 15.0, 40.0],
        "answers": [1.0, 8.0, 15.0, 40.0],
        "cutoff": [1.0, 8.0, 15.0, 40.0, 100.0],
        "split": [5.0, 15.0, 40.0, 100.0],
        "orphans": [15.0, 40.0, 100.0],
        "datacut": [1.0, 10.0, 60.0],
        "delay": [5.0, 20.0, 60.0],
        "badstart": [10.0, 60.0],
        "slowstart": [20.0, 60.0],
        "stuckstart": [10.0, 30.0],
    }
    args = {
        "crash": [1, 0, -9, -11, -6, 70],
        "split": [rng.randrange(1, 2**num_nodes)],
        "burst": [rng.randrange(1, 2**num_nodes)],
        "datacut": [rng.randrange(num_nodes)],
    }
    when = ""
    if kind in _TRIGGERED and rng.random() < triggered:
        when = rng.choice(PHASES)
    return Fault(
        kind,
        round(at_s, 3),
        node=rng.randrange(num_nodes),
        slot=rng.randrange(4),
        duration_s=rng.choice(durations.get(kind, [0.0])),
        arg=rng.choice(args.get(kind, [rng.randrange(1 << 16)])),
        when=when,
    )


@dataclass(frozen=True)
class Settings:
    """The cluster and the job of one run. Times in seconds.

    Attributes:
        slots: of each node.
        length: committed steps after which the train function returns; None: some after the heal.
        step_s: usual step.
        spread: how often a step is committed at different moments by different ranks.
        keeps_undo: workers copy their state before each step.
        late_collective: a collective runs between optimizer and commit: it can be interrupted
            there.
        sloppy: workers answer late now and then.
        checkpoint_steps: steps between checkpoints on disk; 0: none.
        group_timeout_s: a collective with a peer that is cut off fails after this; 0: never.
        drifts: whether the nodes' clocks drift.
    """

    config: Config
    slots: tuple[int, ...]
    length: int | None
    step_s: float
    spread: float
    keeps_undo: bool
    late_collective: bool
    sloppy: bool
    checkpoint_steps: int
    hang_timeout_s: float
    group_timeout_s: float
    ttl_s: float = 10.0
    renew_s: float = 2.0
    request_timeout_s: float = 1.0
    fence_margin_s: float = 2.0


def settings(seed: int, num_nodes: int) -> Settings:
    """The cluster and the job of that seed."""
    rng = Random(f"{seed}/settings")
    slots = tuple([rng.choice([1, 2, 2, 3])] * num_nodes)
    max_nodes = rng.randint(max(1, num_nodes - 2), num_nodes)
    min_nodes = rng.randint(1, max(1, max_nodes // 2))
    checkpoints = rng.random() < 0.4
    config = Config(
        min_world_size=rng.choice([1, 1, 2]) if max_nodes > 1 else 1,
        num_spares=rng.choice([0, 1, 1]),
        replace=rng.random() < 0.85,
        max_deaths_per_slot=rng.choice([3, 6, 10]),
        max_barren_generations=rng.choice([3, 10, 30]),
        start_timeout_s=60.0,
        rendezvous_timeout_s=rng.choice([20.0, 60.0]),
        last_holder_timeout_s=rng.choice([10.0, 30.0]),
        persists=checkpoints,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        last_call_s=rng.choice([0.5, 5.0]),
        quorum_timeout_s=rng.choice([60.0, 600.0, 600.0]),
        grow_delay_s=rng.choice([2.0, 10.0, 30.0]),
        orphan_timeout_s=rng.choice([15.0, 60.0]),
    )
    return Settings(
        config,
        slots,
        length=rng.choice([None, None, None, 40, 150]),
        step_s=rng.choice([0.3, 1.0, 1.0, 2.0]),
        spread=rng.choice([0.0, 0.2, 0.6]),
        keeps_undo=rng.random() < 0.5,
        late_collective=rng.random() < 0.5,
        sloppy=rng.random() < 0.5,
        checkpoint_steps=rng.choice([7, 20]) if checkpoints else 0,
        hang_timeout_s=rng.choice([10.0, 20.0]),
        group_timeout_s=rng.choice([0.0, 15.0, 60.0]),
        renew_s=rng.choice([1.0, 2.0, 3.0]),
    )
