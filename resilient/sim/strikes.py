"""Carries out a run's faults: each at its time, or when what it waits for happens.

The one idea: a fault names its target by index and is judged at the moment it strikes; where the
target is not there, nothing happens. Everything that lasts is ended by the heal.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from resilient.core import events as ev
from resilient.core.model import Slot
from resilient.sim.faults import HURT_S, PHASES, Fault
from resilient.sim.show import show
from resilient.sim.worlds import error_of

if TYPE_CHECKING:
    from resilient.sim.cluster import Cluster, Host
    from resilient.sim.processes import Process

RENAMED = "{}b{}"


class Strikes:
    def __init__(self, cluster: Cluster, faults: tuple[Fault, ...]) -> None:
        self._cluster = cluster
        self._faults = faults
        self._armed: dict[str, list[Fault]] = {phase: [] for phase in PHASES}
        self._num_names = 0
        self._lasting: list[Callable[[], None]] = []  # what the heal has to end
        self._triggering = False

    def begin(self) -> None:
        for fault in self._faults:
            act = self._arm if fault.when else self._strike
            self._cluster.timeline.at(fault.at_s, lambda act=act, fault=fault: act(fault))  # type: ignore[misc]

    def _arm(self, fault: Fault) -> None:
        self._armed[fault.when].append(fault)

    def trigger(self, phase: str) -> None:
        """It has come; what waits for it strikes, now or in a moment."""
        waiting = self._armed.get(phase)
        if not waiting or self._cluster.is_healed:
            return
        fault = waiting.pop(0)
        delay_s = self._cluster.rng.choice([0.0, 0.001, 0.02, 0.3])
        self._cluster.timeline.after(delay_s, lambda: self._strike(fault))

    def _strike(self, fault: Fault) -> None:
        cluster = self._cluster
        if cluster.is_healed or cluster.store.closed is not None:
            return
        cluster.note("fault", show(fault))
        getattr(self, f"_{fault.kind}")(fault)
        cluster.poke()

    def heal(self) -> None:
        """Everything that lasts ends; enough nodes come back."""
        for end in self._lasting:
            end()
        self._lasting = []
        cluster = self._cluster
        cluster.bad_starts.clear()
        for host in cluster.hosts:
            host.frozen_until_s = min(host.frozen_until_s, cluster.timeline.now_s)
            host.thawed_s = min(host.thawed_s, cluster.timeline.now_s)
            cluster.timeline.after(cluster.rng.uniform(0.0, 5.0), lambda h=host: cluster.boot(h))  # type: ignore[misc]

    # ------------------------------------------------------------ helpers

    def _host(self, fault: Fault) -> Host | None:
        hosts = self._cluster.hosts
        host = hosts[fault.node % len(hosts)]
        return host if host.is_up else None

    def _process(self, fault: Fault) -> Process | None:
        """What runs in the slot that the fault names: its rank, if there is one."""
        host = self._host(fault)
        if host is None or host.agent is None:
            return None
        running = [p for _, p in sorted(host.agent.processes.items()) if p.stage != "gone"]
        in_slot = [p for p in running if p.slot and p.slot.local_rank == fault.slot]
        inside = [p for p in in_slot if p.inside]
        found = inside or in_slot or running
        return found[fault.arg % len(found)] if found else None

    def _lasts(self, fault: Fault, end: Callable[[], None]) -> None:
        """Ends after the fault's duration, or with the heal."""
        cluster, ended = self._cluster, [False]

        def once() -> None:
            if not ended[0]:
                ended[0] = True
                end()
                if not cluster.is_healed:
                    cluster.poke()

        self._lasting.append(once)
        cluster.timeline.after(fault.duration_s, once)

    def _come_back(self, host: Host, after_s: float) -> None:
        cluster = self._cluster
        if after_s > 0 and cluster.timeline.now_s + after_s < HURT_S:
            cluster.timeline.after(after_s, lambda: cluster.boot(host))

    def _down(self, host: Host, *, silent: bool) -> None:
        if host.agent is not None:
            host.agent.die(silent=silent)

    # ------------------------------------------------------------ workers

    def _crash(self, fault: Fault) -> None:
        process = self._process(fault)
        if process is not None and not process.unkillable:
            process.exit_later(fault.arg, 0.0)

    def _hang(self, fault: Fault) -> None:
        process = self._process(fault)
        if process is not None:
            process.stuck = True

    def _stop(self, fault: Fault) -> None:
        process = self._process(fault)
        if process is not None:
            process.stuck = process.stopped = True

    def _unkillable(self, fault: Fault) -> None:
        process = self._process(fault)
        if process is not None and not process.doomed:
            process.unkillable = process.stuck = True

    def _raise(self, fault: Fault) -> None:
        process = self._process(fault)
        if process is not None:
            process.error = error_of(f"{100 + fault.arg}")

    def _bug(self, fault: Fault) -> None:
        newest = max((p.step for _, p in self._cluster.living()), default=0)
        self._cluster.bug = (newest + 1, fault.arg)

    def _collective(self, fault: Fault) -> None:
        process = self._process(fault)
        if process is not None and process.world is not None and process.inside:
            process.world.glitch(process)

    def _slow(self, fault: Fault) -> None:
        self._cluster.slowness *= 3.0

        def end() -> None:
            self._cluster.slowness /= 3.0

        self._lasts(fault, end)

    # ------------------------------------------------------------ nodes

    def _power(self, fault: Fault) -> None:
        host = self._host(fault)
        if host is not None:
            self._down(host, silent=True)
            self._come_back(host, fault.duration_s)

    def _panic(self, fault: Fault) -> None:
        host = self._host(fault)
        if host is not None:
            self._down(host, silent=False)
            self._come_back(host, fault.duration_s)

    def _rename(self, fault: Fault) -> None:
        host = self._host(fault)
        if host is None:
            return
        self._down(host, silent=True)
        self._num_names += 1
        name = RENAMED.format(f"n{host.index}", self._num_names)
        cluster = self._cluster
        new = type(host)(cluster, host.index, name, host.num_slots)
        cluster.hosts[host.index] = new
        self._come_back(new, fault.duration_s)

    def _flap(self, fault: Fault) -> None:
        host = self._host(fault)
        if host is None:
            return
        for round_number in range(4):

            def once() -> None:
                if host.is_up and not self._cluster.is_healed:
                    self._down(host, silent=False)
                    self._come_back(host, fault.duration_s)

            self._cluster.timeline.after(round_number * 3 * fault.duration_s, once)

    def _leave(self, fault: Fault) -> None:
        """It goes in an orderly way: its workers first, then its lease."""
        host = self._host(fault)
        if host is None or host.agent is None or host.is_frozen:
            return
        host.agent.leave_job()
        self._come_back(host, fault.duration_s)

    def _pause(self, fault: Fault) -> None:
        host = self._host(fault)
        if host is not None:
            host.freeze(min(fault.duration_s, HURT_S - self._cluster.timeline.now_s))

    def _leader(self, fault: Fault) -> None:
        """Whoever leads: gone, or (no duration) frozen for longer than its lease."""
        agent = self._cluster.leading()
        if agent is None or not agent.host.is_up:
            return
        if fault.duration_s:
            self._down(agent.host, silent=fault.arg % 2 == 0)
            self._come_back(agent.host, fault.duration_s)
        else:
            agent.host.freeze(min(14.0, HURT_S - self._cluster.timeline.now_s))

    def _burst(self, fault: Fault) -> None:
        """Several nodes within a moment; at least one stays."""
        hosts = [h for h in self._cluster.hosts if fault.arg >> h.index & 1 and h.is_up]
        for host in hosts[: len(self._cluster.hosts) - 1]:
            self._down(host, silent=fault.slot % 2 == 0)
            self._come_back(host, fault.duration_s)

    def _health(self, fault: Fault) -> None:
        host = self._host(fault)
        if host is not None and host.agent is not None and not host.is_frozen:
            slot = Slot(host.name, fault.slot % host.num_slots)
            host.agent.see(ev.HealthCheckFailed(slot, "bad memory"))

    def _drain(self, fault: Fault) -> None:
        host = self._host(fault)
        if host is not None and host.agent is not None and not host.is_frozen:
            self._cluster.asked_to_drain = True
            host.agent.see(ev.DrainRequested(15))

    # ------------------------------------------------------------ the network and the store

    def _outage(self, fault: Fault) -> None:
        cluster = self._cluster
        cluster.network.store_down += 1

        def end() -> None:
            cluster.network.store_down -= 1
            cluster.store.rearm(cluster.timeline.now_s)

        self._lasts(fault, end)

    def _compact(self, fault: Fault) -> None:
        """It is cut off for a while, and finds its position gone."""
        host = self._host(fault)
        if host is not None and host.agent is not None:
            for watch in host.agent.watches():
                watch.compacted = True
            self._cut_off(fault, [host.name], requests=False)

    def _requests(self, fault: Fault) -> None:
        self._cut_off(fault, self._names(fault), answers=False)

    def _answers(self, fault: Fault) -> None:
        self._cut_off(fault, self._names(fault), requests=False)

    def _cutoff(self, fault: Fault) -> None:
        names = self._names(fault)
        self._cut_off(fault, names)
        if fault.arg % 2:
            self._cut_apart(fault, names)

    def _split(self, fault: Fault) -> None:
        """A group of nodes is on its own, among themselves well connected."""
        names = [h.name for h in self._cluster.hosts if fault.arg >> h.index & 1]
        self._cut_off(fault, names)
        self._cut_apart(fault, names)

    def _orphans(self, fault: Fault) -> None:
        """The nodes of the current generation lose the store, all of them; the others do not."""
        published = self._cluster.store.published
        if published is not None:
            names = {member.slot.node for member in published.plan.members}
            self._cut_off(fault, sorted(names))

    def _datacut(self, fault: Fault) -> None:
        hosts = self._cluster.hosts
        a, b = hosts[fault.node % len(hosts)].name, hosts[fault.arg % len(hosts)].name
        network = self._cluster.network
        if a != b:
            network.cut_pair(a, b, 1)
            self._lasts(fault, lambda: network.cut_pair(a, b, -1))

    def _delay(self, fault: Fault) -> None:
        network = self._cluster.network
        for name in self._names(fault):
            network.slow[name] += 1
            self._lasts(fault, lambda name=name: network.slow.subtract([name]))  # type: ignore[misc]

    def _names(self, fault: Fault) -> list[str]:
        return [self._cluster.hosts[fault.node % len(self._cluster.hosts)].name]

    def _cut_off(
        self, fault: Fault, names: list[str], *, requests: bool = True, answers: bool = True
    ) -> None:
        """From the store, in one direction or both."""
        network = self._cluster.network
        cut = ([network.requests_lost] if requests else []) + (
            [network.answers_lost] if answers else []
        )
        for counter in cut:
            counter.update(names)

        def end() -> None:
            for counter in cut:
                counter.subtract(names)

        self._lasts(fault, end)

    def _cut_apart(self, fault: Fault, names: list[str]) -> None:
        """Those from all others, in the data plane."""
        network = self._cluster.network
        others = [h.name for h in self._cluster.hosts if h.name not in names]
        pairs = [(a, b) for a in names for b in others]
        for a, b in pairs:
            network.cut_pair(a, b, 1)

        def end() -> None:
            for a, b in pairs:
                network.cut_pair(a, b, -1)

        self._lasts(fault, end)

    # ------------------------------------------------------------ starts

    def _badstart(self, fault: Fault) -> None:
        self._starts(fault)

    def _slowstart(self, fault: Fault) -> None:
        self._starts(fault)

    def _stuckstart(self, fault: Fault) -> None:
        self._starts(fault)

    def _starts(self, fault: Fault) -> None:
        """On half of the nodes."""
        cluster = self._cluster
        cluster.starts_were_bad = True
        keys = [(fault.kind, h.index) for h in cluster.hosts if (h.index + fault.node) % 2]
        cluster.bad_starts.update(keys)

        def end() -> None:
            if not cluster.is_healed:
                cluster.bad_starts.subtract(keys)

        self._lasts(fault, end)
