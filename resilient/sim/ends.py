"""Whether a job had to end as it did: each outcome needs a reason of its own in what was true.

An end that nothing justifies is a broken promise like any other: a job that gives up could have
gone on.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from resilient.core import changes as ch
from resilient.core import events as ev
from resilient.core.model import Outcome, Worker

if TYPE_CHECKING:
    from resilient.sim.checkers import Checks
    from resilient.sim.cluster import Cluster
    from resilient.sim.worlds import World

SLACK_S = 5.0


class Ends:
    """raised: (step, frame) of all that train functions have raised by themselves."""

    def __init__(self, cluster: Cluster, checks: Checks) -> None:
        self.cluster = cluster
        self.checks = checks
        self.raised: list[tuple[int, str]] = []
        self._lack_since_s: float | None = 0.0
        self._published_s = 0.0
        self._gone_s: dict[str, float] = {}
        self._is_decorated = False
        self._ended_as_script = False
        self._to_be_killed: set[Worker] = set()  # each had its time to come out
        self._stepped: list[World | None] = []  # of each generation, in order

    def on_change(self, change: ch.Change) -> None:
        if isinstance(change, (ch.NodeArrived, ch.NodeGone)):
            self.count_nodes()
            self._gone_s[change.node] = self.cluster.timeline.now_s
        elif isinstance(change, ch.Published):
            self._published_s = self.cluster.timeline.now_s
            self._stepped.append(None)
        elif isinstance(change, ch.Reported):
            self._is_decorated = self._is_decorated or isinstance(change.event, ev.WorkerReady)
        elif isinstance(change, ch.Ordered):
            for one in change.effects:
                if isinstance(one, ev.KillWorker) and not self.checks.is_ending:
                    self.checks.on_kill(one.worker, one.reason)
                    self._to_be_killed.add(one.worker)
            terminates = any(isinstance(one, ev.TerminateWorker) for one in change.effects)
            self._ended_as_script |= terminates and not self._is_decorated

    def on_step(self, world: World) -> None:
        if self._stepped:
            self._stepped[-1] = world

    def _is_known(self, world: World | None) -> bool:
        """Whether the generation has taken a step, and somebody lives who knows of it."""
        return world is not None and any(
            process.agent.runs and process.step > world.plan.cut.step
            for process in world.ranks.values()
        )

    def count_nodes(self) -> None:
        """Whether there are enough nodes with a slot that is not excluded, and enough slots."""
        cluster, config = self.cluster, self.cluster.settings.config
        usable = [
            sum((lease.node, rank) not in cluster.excluded for rank in range(lease.num_slots))
            for lease in cluster.store.leases.values()
        ]
        nodes = sum(slots > 0 for slots in usable)
        most = sum(sorted(usable)[-config.max_nodes :])
        if nodes >= config.min_nodes and most >= config.min_world_size:
            self._lack_since_s = None
        elif self._lack_since_s is None:
            self._lack_since_s = cluster.timeline.now_s

    def on_closed(self, closed: ch.Closed) -> None:
        outcome = closed.outcome
        why = {
            Outcome.DONE: self._is_done,
            Outcome.DRAINED: self._is_drained,
            Outcome.TRAIN_FUNCTION_FAILED: self._has_failed,
            Outcome.UNRECOVERABLE: self._is_unrecoverable,
            Outcome.SCRIPT_FAILED: self._failed_as_script,
            Outcome.SIGNALLED: self._is_signalled,
        }
        if outcome is None or outcome not in why or not why[outcome]():
            self.checks.fail("legitimate end", f"{outcome}: {closed.reason}")

    def _is_done(self) -> bool:
        """Every rank of the last plan has finished, with one and the same state."""
        length = self.cluster.length
        if length is None or not self.checks.plans:
            return False
        plan = self.checks.plans[max(self.checks.plans)]
        final = set()
        for member in plan.members:
            process = self.cluster.processes[member.worker]
            if process.live is None or process.step != length:
                return False
            final.add(process.live[0])
        return len(final) == 1

    def _is_drained(self) -> bool:
        return self.cluster.asked_to_drain

    def _none_was_ready(self) -> bool:
        """Nobody had told yet that the script is decorated: it was ended as any other."""
        return self._ended_as_script or not self._is_decorated

    def _is_signalled(self) -> bool:
        """As any script; or trained to the end, and asked to stop while it ran on."""
        return self._none_was_ready() or (self._is_drained() and self._is_done())

    def _failed_as_script(self) -> bool:
        """Not known to be decorated yet, or trained to the end and failed after it."""
        return self._none_was_ready() or self._is_done()

    def _has_failed(self) -> bool:
        return max(Counter(self.raised).values(), default=0) >= 2

    def _is_unrecoverable(self) -> bool:
        cluster, config = self.cluster, self.cluster.settings.config
        now_s = cluster.timeline.now_s
        since_s = self._lack_since_s
        if since_s is not None and now_s - since_s >= config.quorum_timeout_s - SLACK_S:
            return True
        waited_s = now_s - self._published_s
        if waited_s >= config.quorum_timeout_s - SLACK_S and cluster.starts_were_bad:
            return True
        barren = self._stepped[-config.max_barren_generations :]
        known = any(self._is_known(world) for world in barren)
        if len(barren) == config.max_barren_generations and not known:
            return True
        return self._all_copies_are_lost() or self._too_few_slots()

    def _all_copies_are_lost(self) -> bool:
        """A node that was cut off after the last plan may come back with its copies: it is waited
        for."""
        plans = self.checks.plans
        if not plans or not any(self._stepped):
            return False
        base = self.checks.bases[max(plans)]
        now_s, patience_s = (
            self.cluster.timeline.now_s,
            self.cluster.settings.config.quorum_timeout_s,
        )
        for worker, process in self.cluster.living():
            if process.stuck or process.doomed or not process.agent.runs:
                continue
            if worker in self._to_be_killed or process.slot in self.cluster.excluded:
                continue
            gone_s = self._gone_s.get(worker.node, -1.0)
            is_given_up = gone_s < self._published_s or now_s - gone_s >= patience_s - SLACK_S
            if worker.node not in self.cluster.store.leases and is_given_up:
                continue
            if self.checks.valid_copies(process, base):
                return False
        return self.checks.disk_at_end is None

    def _too_few_slots(self) -> bool:
        """Of those that are not excluded, and have no process that cannot be ended."""
        barred = set(self.cluster.excluded)
        barred.update(p.slot for _, p in self.cluster.living() if p.unkillable and p.slot)
        left = [
            sum((host.name, rank) not in barred for rank in range(host.num_slots))
            for host in self.cluster.hosts
        ]
        config = self.cluster.settings.config
        most = sum(sorted(left)[-config.max_nodes :])
        return most < config.min_world_size or sum(slots > 0 for slots in left) < config.min_nodes
