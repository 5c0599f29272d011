"""One generation as its ranks live it: groups are made, the state is handed round, steps are taken.

The one idea: everything here needs *all* ranks at once, and each rank's own part of it happens a
little earlier or later than the others'. A rank that is gone, or came out, breaks it for good; one
that is frozen, stuck or cut off holds it up for as long as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from resilient.core import events as ev
from resilient.core.cut import source_of
from resilient.core.model import CutKind, ErrorInfo, Plan
from resilient.sim.content import ROOT
from resilient.sim.processes import COLLECTIVE_ERROR, Process

if TYPE_CHECKING:
    from resilient.sim.cluster import Cluster


_GIVES = ("joined", "training", "finished")


class World:
    """ranks: the processes inside, by rank; one that has left is not replaced."""

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        self.cluster = cluster
        self.plan = plan
        self.ranks: dict[int, Process] = {}
        self.is_broken = False
        self.num_steps = 0
        self._rank_of = {member.worker: member.rank for member in plan.members}
        self._nodes = sorted({member.slot.node for member in plan.members})
        self._joining = False
        self._waiting: list[Process] = []  # receivers whose holder is not there yet
        self._stepping = False  # a collective is on its way
        self._stall = 0
        self._given: dict[int, int] = {}
        self._persisted: int | None = None

    @property
    def generation(self) -> int:
        return self.plan.generation

    def rank_of(self, process: Process) -> int:
        return self._rank_of[process.worker]

    def is_over(self) -> bool:
        return self.is_broken and not any(process.inside for process in self.ranks.values())

    def poke(self) -> None:
        """Something that may have held it up is over."""
        if self.is_broken:
            return
        self._try_join()
        for process in list(self._waiting):
            self._try_receive(process)
        self._try_step()

    def _all_can_act(self) -> bool:
        """Every rank runs, and every node reaches every other one."""
        if not all(process.acts for process in self.ranks.values()):
            return False
        network = self.cluster.network
        if not network.num_cuts:
            return True
        pairs = [(a, b) for a in self._nodes for b in self._nodes if a < b]
        return all(network.can_reach(a, b) for a, b in pairs)

    # ------------------------------------------------------------ groups

    def entered(self, process: Process) -> None:
        self.ranks[self.rank_of(process)] = process
        process.later(self.cluster.rng.uniform(0.3, 2.0), lambda: self._look_at_store(process))
        if not self.is_broken:
            self._try_join()
        elif self.cluster.rng.random() < 0.5:
            self._break_for(process)

    def _look_at_store(self, process: Process) -> None:
        """Its TCPStore is gone with the agent that held it: nobody joins any more."""
        in_time = process.stage == "entered" and process.generation == self.generation
        if in_time and not self._store_is_there():
            process.fail(COLLECTIVE_ERROR, in_collective=True)

    def _store_is_there(self) -> bool:
        host = self.cluster.host_of(self.plan.store[0])
        return host is not None and host.agent is not None and host.agent.runs

    def _try_join(self) -> None:
        if self._joining or len(self.ranks) < self.plan.world_size or not self._store_is_there():
            return
        network, store = self.cluster.network, self.plan.store[0]
        reaches = all(node == store or network.can_reach(node, store) for node in self._nodes)
        if not reaches or not self._all_can_act():
            return
        self._joining = True
        for _, process in sorted(self.ranks.items()):
            self._soon(process, 0.02, self._joined)

    def _soon(self, process: Process, max_s: float, action: Callable[[Process], None]) -> None:
        generation = self.generation

        def act() -> None:
            if process.inside and process.generation == generation and not process.doomed:
                action(process)

        process.later(self.cluster.rng.uniform(0.001, max_s), act)

    def _joined(self, process: Process) -> None:
        if process.stage != "entered":
            return
        process.stage = "joined"
        process.progress()
        process.say(ev.WorkerJoined(process.worker, self.generation))
        cut, rank = self.plan.cut, self.rank_of(process)
        if cut.kind is CutKind.INITIAL:
            self._given[rank] = ROOT
        elif cut.kind is CutKind.DISK:
            self._given[rank] = self.cluster.read_disk(cut.step)
        elif rank in cut.holders:
            held = process.copy_at(cut.step)
            if held is None:
                self.cluster.checks.fail(
                    "holders", f"{process.worker} is to give step {cut.step} and does not hold it"
                )
            self._given[rank] = held if held is not None else ROOT
        else:
            self._waiting.append(process)
            self._try_receive(process)
            return
        self._soon(process, 0.3, self._restored)
        for waiting in list(self._waiting):
            self._try_receive(waiting)

    def _try_receive(self, process: Process) -> None:
        source_rank = self.cluster.sources(self.plan)[self.rank_of(process)]
        source = self.ranks.get(source_rank)
        if self.is_broken or source is None or source_rank not in self._given:
            return
        if not (source.acts and process.acts and process.stage == "joined"):
            return
        if not self.cluster.network.can_reach(source.worker.node, process.worker.node):
            return
        self._waiting.remove(process)
        process.live = process.undo = None  # overwritten from here on
        self._given[self.rank_of(process)] = self._given[source_rank]

        def received(receiver: Process) -> None:
            assert source is not None
            if source.generation == self.generation and source.stage in _GIVES:
                self._restored(receiver)
            else:
                receiver.fail(COLLECTIVE_ERROR, in_collective=True)

        self._soon(process, self.cluster.rng.choice([0.1, 0.1, 3.0]), received)

    def _restored(self, process: Process) -> None:
        if process.stage != "joined":
            return
        process.restored(self._given[self.rank_of(process)])
        self.cluster.checks.on_restored(self, process)
        process.finish_if_done()
        self._try_step()

    # ------------------------------------------------------------ steps

    def _trains(self) -> bool:
        return (
            not self.is_broken
            and len(self.ranks) == self.plan.world_size
            and all(
                process.stage == "training" and process.generation == self.generation
                for process in self.ranks.values()
            )
        )

    def _try_step(self) -> None:
        if self._stepping or not self._trains():
            return
        self._stepping = True
        cluster = self.cluster
        step_s = cluster.settings.step_s * cluster.rng.uniform(0.9, 1.1) * cluster.slowness
        cluster.timeline.after(step_s, self._collective)

    def _collective(self) -> None:
        """The gradients have been exchanged, if everybody could take part."""
        if self.is_broken or not self._trains():
            self._stepping = False
            return
        if self._one_raises():
            self._stepping = False
            return
        if not self._all_can_act():
            self._stepping = False
            self._stalled()
            return
        self._stall += 1
        self.num_steps += 1
        self.cluster.checks.on_step(self)
        self.cluster.stepped(self)
        rng = self.cluster.rng
        ranks = [process for _, process in sorted(self.ranks.items())]
        if rng.random() >= self.cluster.settings.spread:
            for process in ranks:
                process.begin_step()
                process.commit()
            self._stepping = False
            self._try_step()
            return
        longest_s = 0.0
        for process in ranks:
            got_s = rng.uniform(0.0, 0.03)
            done_s = got_s + rng.uniform(0.001, 0.3)
            longest_s = max(longest_s, done_s)
            self._spread_step(process, got_s, done_s)

        def over() -> None:
            self._stepping = False
            self._try_step()

        self.cluster.timeline.after(longest_s + 0.001, over)

    def _spread_step(self, process: Process, got_s: float, done_s: float) -> None:
        """This rank has the result after got_s and commits the step after done_s; an abort before
        the former finds it in the collective, as it was before the step."""
        generation, before = self.generation, process.step

        def is_here() -> bool:
            here = process.stage == "training" and process.generation == generation
            return here and process.step == before and not process.doomed

        def got() -> None:
            if is_here():
                process.begin_step()

        def done() -> None:
            if is_here() and process.dirty:
                process.commit()

        process.later(got_s, got)
        process.later(done_s, done)

    def _one_raises(self) -> bool:
        for rank, process in sorted(self.ranks.items()):
            error = process.error or self.cluster.bug_at(process, rank, self.plan.world_size)
            if error is not None and process.acts:
                process.error = None
                self.cluster.checks.raised(process.step, error)
                process.fail(error, in_collective=False)
                return True
        return False

    def _stalled(self) -> None:
        """Nobody comes out of this one by itself, but for the group's timeout."""
        timeout_s, stall = self.cluster.settings.group_timeout_s, self._stall
        if timeout_s:

            def give_up() -> None:
                if self._stall == stall and not self.is_broken and not self._stepping:
                    for _, process in sorted(self.ranks.items()):
                        self._soon(process, 0.3, self._break_for)

            self.cluster.timeline.after(timeout_s, give_up)

    def persisted(self, process: Process) -> None:
        """A checkpoint every few steps; rank 0 writes it, all learn of it."""
        process.persisted = max(
            (s for s in (process.persisted, self._persisted) if s is not None), default=None
        )
        every = self.cluster.settings.checkpoint_steps
        if not every or process.step % every or self.rank_of(process) != 0:
            return
        assert process.live is not None
        step, content = process.step, process.live[0]

        def written() -> None:
            self.cluster.write_disk(step, content)
            process.persisted = max(process.persisted or 0, step)
            self._persisted = max(self._persisted or 0, step)

        process.later(self.cluster.rng.uniform(0.3, 3.0), written)

    # ------------------------------------------------------------ the end

    def glitch(self, process: Process) -> None:
        """A collective fails for this rank, though everybody is alive."""
        if process.stage == "training":
            process.fail(COLLECTIVE_ERROR, in_collective=True)

    def lose(self, process: Process, *, silent: bool) -> None:
        """A rank has died or come out. silent: its machine says nothing any more."""
        if process.generation != self.generation:
            return
        self.is_broken = True
        if silent:
            return
        for _, peer in sorted(self.ranks.items()):
            if peer is process or not peer.inside or peer.generation != self.generation:
                continue
            if not self.cluster.network.can_reach(peer.worker.node, process.worker.node):
                continue
            if self.cluster.rng.random() < 0.7:
                self._soon(peer, 0.05, self._break_for)

    def _break_for(self, process: Process) -> None:
        if process.generation == self.generation:
            process.fail(COLLECTIVE_ERROR, in_collective=True)


def sources(plan: Plan) -> dict[int, int]:
    """Per receiving rank, the rank that sends it the state."""
    found = {}
    for rank in range(plan.world_size):
        source = source_of(plan.cut, rank, plan.world_size)
        if source is not None:
            found[rank] = source
    return found


def error_of(name: str) -> ErrorInfo:
    """An exception of the user's own code, told apart by where it is raised."""
    return ErrorInfo("builtins.ValueError", f"train.py:{name} in main")
