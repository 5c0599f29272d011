"""The event loop of one node: a shell around the coordinator, and nothing that decides.

Data flows one way. What is seen (a worker's datagram, the end of a process, a page that stands
still, a signal, a clock) becomes an event; `core.coordinator.step` makes a decision of it; the
decision is journalled, then its effects are carried out in order. Effects that take a while (a
stack dump has to reach the disk before the abort that follows) hold back the ones behind them,
never the loop.

Nothing on the way from a fault to the next step sleeps or polls: deaths come from the zygote,
messages from sockets. Polling is only for what sends nothing: the progress pages.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from resilient import wire
from resilient.core import coordinator
from resilient.core import events as ev
from resilient.core.detector import Detector
from resilient.core.model import Fault, Outcome, Plan, Worker
from resilient.errors import ConfigError
from resilient_run import environment, evidence, scratch, watch
from resilient_run import zygote as zg
from resilient_run.console import Console
from resilient_run.heritage import Heritage
from resilient_run.journal import Journal
from resilient_run.logs import Logs
from resilient_run.options import Options
from resilient_run.status import StatusServer
from resilient_run.stores import Stores
from resilient_run.workers import WorkerProcess, ZygoteChannel

POLL_S = 0.1
SHOW_S = 0.25
SPARE_DELAY_S = 0.25
FORK_TIMEOUT_S = 10.0
STORE_LINGER_S = 0.25
SAME_SIGNAL_S = 0.5
SWEEP_DELAY_S = 1.0
LOST_ZYGOTE = "the zygote (the process that workers are forked from) has ended"

EXIT_CODES = {
    Outcome.DONE: 0,
    Outcome.TRAIN_FUNCTION_FAILED: 1,
    Outcome.MISCONFIGURED: 2,
    Outcome.UNRECOVERABLE: 70,
    Outcome.DRAINED: 75,
}


def exit_code(outcome: Outcome, cause: Fault | None, signum: int | None) -> int:
    """The exit code of resilient-run: as EXIT_CODES; for an unmodified script its own."""
    if outcome is Outcome.SIGNALLED:
        return 128 + (signum or signal.SIGTERM)
    if outcome is not Outcome.SCRIPT_FAILED:
        return EXIT_CODES[outcome]
    status = cause.status if cause is not None else None
    if status is None:  # it hung
        return 128 + signal.SIGKILL
    return status or 1 if status >= 0 else 128 - status


class Agent:
    """Runs one job to its end."""

    def __init__(self, options: Options, zygote: ZygoteChannel) -> None:
        self.options = options
        self.zygote = zygote
        self.state = coordinator.initial(options.config)
        self.workers: dict[Worker, WorkerProcess] = {}
        self.logs = Logs(options.logs, options.num_slots, options.run_id)
        self.journal = Journal(self.logs.run_directory)
        self.stores = Stores(options.host, options.master_port)
        self.detector = Detector(options.limits)
        self.heritage = Heritage()
        self.console = Console()
        self.status = StatusServer(self.logs.run_directory, self.describe)
        self._events: deque[ev.Event] = deque()
        self._effects: deque[ev.Effect] = deque()
        self._advancing = False
        self._holding = False  # an effect is not done yet
        self._wake: asyncio.TimerHandle | None = None
        self._fork_timers: dict[Worker, asyncio.TimerHandle] = {}
        self._spares_to_come: dict[Worker, tuple[asyncio.TimerHandle, ev.StartWorker]] = {}
        self._to_kill: set[Worker] = set()  # as soon as they are forked
        self._drains: list[tuple[float, int]] = []
        self._num_recoveries = 0
        self._num_oom_kills = evidence.num_oom_kills()
        self._start_s = time.monotonic()
        self._shown_s = 0.0
        self._carry_out: dict[type[Any], Callable[[Any], None]] = {
            ev.OpenStore: self._open_store,
            ev.StartWorker: self._start_worker,
            ev.PublishPlan: lambda effect: None,  # one node: in the journal, and in memory
            ev.StartGeneration: self._start_generation,
            ev.AbortGeneration: self._abort_generation,
            ev.DumpStacks: self._dump_stacks,
            ev.TerminateWorker: self._terminate,
            ev.KillWorker: self._kill,
            ev.ExcludeSlot: lambda effect: None,
            ev.Persist: self._persist,
            ev.Look: lambda effect: self._send(effect.worker, wire.Look()),
            ev.Close: self._close,
            ev.Stop: self._stop,
            ev.Finish: self._finish,
        }

    # ------------------------------------------------------------ life

    def run(self) -> int:
        """Returns the exit code.

        Raises:
            ConfigError: the job cannot begin.
        """
        try:
            return asyncio.run(self._run())
        finally:
            self.console.close()
            self.zygote.close()
            scratch.remove(self.options.launch.scratch)  # if the zygote could not
            self.logs.close()
            self.journal.close()

    async def _run(self) -> int:
        loop = self.loop = asyncio.get_running_loop()
        loop.set_exception_handler(self._on_bug)
        self._done: asyncio.Future[ev.Finish] = loop.create_future()
        for signum in self.options.signals:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                loop.add_signal_handler(signum, self._asked_to_stop, signum)
        for signum in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(signum, self._forward, signum)
        self.journal.begin(self.options.config, self.options.argv, self._start_s, time.time())
        self.status.start(loop)
        loop.add_reader(self.zygote.socket, self._on_zygote)
        loop.call_later(POLL_S, self._poll)
        try:
            finish = await self._done
        finally:
            self.status.close(loop)
            loop.remove_reader(self.zygote.socket)
            if self._wake is not None:
                self._wake.cancel()
        self.console.close()
        self.logs.close()
        if self.state.plan is not None:
            self.console.report(self.journal.path, finish.outcome, self.state.decorated)
        else:
            self.console.say(finish.reason)
        return exit_code(finish.outcome, finish.root_cause, self.state.draining)

    def _on_bug(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """An exception in a callback is a bug of ours: better no job than one without an agent."""
        error = context.get("exception")
        self._end_with(error if isinstance(error, Exception) else RuntimeError(context["message"]))

    def _end_with(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    # ------------------------------------------------------------ event -> decision -> effects

    def feed(self, event: ev.Event) -> None:
        """Takes one event in; its effects are carried out before this returns, unless held."""
        self._events.append(event)
        self._advance()

    def _advance(self) -> None:
        if self._advancing:
            return  # an effect has brought an event: its turn comes
        self._advancing = True
        try:
            while not self._holding and not self._done.done():
                if self._effects:
                    effect = self._effects.popleft()
                    self._carry_out[type(effect)](effect)
                elif self._events:
                    self._decide(self._events.popleft())
                else:
                    return
        except ConnectionError:
            self._lose_zygote()
        except ConfigError as error:
            self._end_with(error)
        finally:
            self._advancing = False

    def _decide(self, event: ev.Event) -> None:
        now_s = time.monotonic()
        before = self.state
        decision = coordinator.step(before, event, now_s)
        self.state = decision.state
        self._effects.extend(decision.effects)
        self.journal.add(now_s, event, decision)
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        if decision.wake_s is not None:
            self._wake = self.loop.call_at(decision.wake_s, self.feed, ev.TimePassed())
        # After the effects: a slow terminal must not delay a recovery.
        step = max((p.page.read().step for p in self.workers.values()), default=0)
        self.loop.call_soon(self.console.tell, before, event, decision, now_s, step)

    # ------------------------------------------------------------ effects: workers

    def _open_store(self, effect: ev.OpenStore) -> None:
        # Soon, not now: between telling workers to start and hearing of them there is time.
        self.loop.call_soon(self._open_store_now, effect.generation)

    def _open_store_now(self, generation: int) -> None:
        if self._done.done():
            return
        try:
            host, port = self.stores.open(generation)
        except ConfigError as error:
            self._end_with(error)
        else:
            self.feed(ev.StoreOpened(generation, host, port))

    def _start_worker(self, effect: ev.StartWorker) -> None:
        """A spare is launched a little later: it must not take the CPU from the first step."""
        if effect.slot is None:
            timer = self.loop.call_later(SPARE_DELAY_S, self._launch_spare, effect)
            self._spares_to_come[effect.worker] = (timer, effect)
        else:
            self._launch(effect)

    def _launch_spare(self, effect: ev.StartWorker) -> None:
        if self._spares_to_come.pop(effect.worker, None) is not None and not self._done.done():
            try:
                self._launch(effect)
            except ConnectionError:
                self._lose_zygote()

    def _launch(self, effect: ev.StartWorker) -> None:
        worker, slot, plan = effect.worker, effect.slot, effect.plan
        first = plan is not None and plan.rank_of(worker) is not None and slot is not None
        if first and slot is not None:
            logs = self.logs.of_slot(effect.restart_count, slot.local_rank)
        else:
            logs = self.logs.of_worker(effect.restart_count, worker.number)
            if slot is not None:
                self.logs.take_slot(effect.restart_count, logs, slot.local_rank)
        values = environment.of_process(
            self.options, plan, slot, effect.restart_count, logs.error_file
        )
        attach = self.options.launch.kind != "command"
        process = self.zygote.fork(worker, slot, values, logs, attach=attach)
        self.workers[worker] = process
        self.loop.add_reader(process.socket, self._on_worker, process)
        self._fork_timers[worker] = self.loop.call_later(FORK_TIMEOUT_S, self._lose_zygote)
        if plan is not None and not self.state.decorated:
            members = [m.worker for m in plan.members]
            now_s = time.monotonic()
            self.detector.watch(plan.generation, members, now_s, decorated=False)
            self.loop.call_later(STORE_LINGER_S, self.stores.close_before, plan.generation)

    def _kill(self, effect: ev.KillWorker) -> None:
        to_come = self._spares_to_come.pop(effect.worker, None)
        if to_come is not None:
            to_come[0].cancel()
            self.feed(ev.WorkerExited(effect.worker, -signal.SIGKILL, note="was never launched"))
            return
        process = self.workers.get(effect.worker)
        if process is not None and process.pidfd is None:
            self._to_kill.add(effect.worker)
        elif process is not None:
            process.kill()

    def _terminate(self, effect: ev.TerminateWorker) -> None:
        if effect.worker in self.workers:
            self.zygote.signal_group(effect.worker.number, effect.signum)

    def _send(self, worker: Worker, message: wire.Message, fds: tuple[int, ...] = ()) -> None:
        process = self.workers.get(worker)
        if process is not None:
            process.send(message, fds)

    def _persist(self, effect: ev.Persist) -> None:
        self._send(effect.worker, wire.Persist(effect.step))

    def _close(self, effect: ev.Close) -> None:
        for worker in effect.workers:
            self._send(worker, wire.Close())
        self.detector.close(time.monotonic())

    def _stop(self, effect: ev.Stop) -> None:
        code = exit_code(effect.outcome, self.state.root_cause, self.state.draining)
        for worker in effect.workers:
            self._send(worker, wire.Stop(code, effect.reason))

    def _finish(self, effect: ev.Finish) -> None:
        if not self._done.done():
            self._done.set_result(effect)

    # ------------------------------------------------------------ effects: generations

    def _start_generation(self, effect: ev.StartGeneration) -> None:
        plan = effect.plan
        pages = [process.page for process in self.workers.values()]
        drills = self.heritage.drills_left(self.options.drills, pages)
        for member in plan.members:
            page = self.heritage.predecessor(plan, member.rank, member.worker)
            start = wire.Start(
                generation=plan.generation,
                rank=member.rank,
                local_rank=member.slot.local_rank,
                world_size=plan.world_size,
                store_host=plan.store[0],
                store_port=plan.store[1],
                cut=plan.cut,
                first_world_size=plan.first_world_size,
                environment=environment.of_member(
                    self.options, plan, member, self.state.num_restarts
                ),
                drills=drills,
            )
            self._send(member.worker, start, () if page is None else (page.fd,))
        now_s = time.monotonic()
        self.detector.watch(plan.generation, [m.worker for m in plan.members], now_s)
        self.heritage.enter(plan, {w: p.page for w, p in self.workers.items()})
        self.loop.call_soon(self._settle, plan)

    def _settle(self, plan: Plan) -> None:
        """What the workers need not wait for."""
        if plan.generation > 0:
            self._num_recoveries += 1
        for member in plan.members:
            process = self.workers.get(member.worker)
            if process is not None and process.slot != member.slot:
                process.slot = member.slot
                local_rank = member.slot.local_rank
                self.logs.take_slot(self.state.num_restarts, process.logs, local_rank)
        self.loop.call_later(STORE_LINGER_S, self.stores.close_before, plan.generation)

    def _abort_generation(self, effect: ev.AbortGeneration) -> None:
        abort = wire.Abort(effect.generation, effect.reason)
        for worker in effect.workers:
            self._send(worker, abort)
        self.detector.stop()
        for timer, spare in list(self._spares_to_come.values()):
            timer.cancel()
            self._launch_spare(spare)
        # A worker that is blocked in the store, and has not got out by itself, comes out now.
        self.loop.call_later(STORE_LINGER_S, self.stores.close_before, effect.generation + 1)

    def _dump_stacks(self, effect: ev.DumpStacks) -> None:
        """Holds back what follows until the stacks are written, or a bound is over."""
        asked = watch.ask_for_stacks(self.workers[w] for w in effect.workers if w in self.workers)
        if asked:
            self._holding = True
            self.loop.create_task(self._wait_stacks_written(asked))

    async def _wait_stacks_written(self, asked: dict[str, int]) -> None:
        await watch.wait_stacks_written(asked)
        self._holding = False
        self._advance()

    # ------------------------------------------------------------ what the zygote says

    def _on_zygote(self) -> None:
        try:
            while (received := self.zygote.receive()) is not None:
                reply, fds = received
                if isinstance(reply, zg.Warm):
                    self._on_warm(reply)
                elif isinstance(reply, zg.Forked):
                    self._on_forked(reply, fds[0])
                elif isinstance(reply, zg.Refused):
                    note = f"could not be started: {reply.error}"
                    self._on_exited(reply.number, 1, note)
                else:
                    self._on_exited(reply.number, reply.status)
        except ConnectionError:
            self._lose_zygote()

    def _on_warm(self, reply: zg.Warm) -> None:
        if reply.error:
            self._end_with(ConfigError(reply.error))
        else:
            self.feed(ev.NodeJoined(self.options.node, self.options.num_slots))

    def _on_forked(self, reply: zg.Forked, pidfd: int) -> None:
        worker = Worker(self.options.node, reply.number)
        process = self.workers[worker]
        process.pid, process.pidfd = reply.pid, pidfd
        self._fork_timers.pop(worker).cancel()
        if worker in self._to_kill:
            self._to_kill.discard(worker)
            process.kill()

    def _on_exited(self, number: int, status: int, note: str = "") -> None:
        worker = Worker(self.options.node, number)
        process = self.workers[worker]
        self._on_worker(process)  # what it said before it ended comes first
        del self.workers[worker]
        timer = self._fork_timers.pop(worker, None)
        if timer is not None:
            timer.cancel()
        self.loop.remove_reader(process.socket)
        reading = process.page.read()
        event = ev.WorkerExited(
            worker,
            status,
            step=reading.step,
            persisted_step=reading.persisted_step,
            began_s=reading.fault_ns / 1e9 if reading.fault_ns else None,
            note="\n".join(filter(None, (note, self._evidence(process, status)))),
            error=evidence.read_error_file(process.logs.error_file) if status > 0 else None,
        )
        self.heritage.bury(worker, process.page)
        process.close()
        # Later: it must not delay a recovery, and what the worker started takes a moment to die.
        path = scratch.of_worker(self.options.launch.scratch, number)
        self.loop.call_later(SWEEP_DELAY_S, scratch.remove_of_worker, path)
        self.feed(event)

    def _evidence(self, process: WorkerProcess, status: int) -> str:
        if status == 0:
            return ""
        lines = []
        if status == -signal.SIGKILL and self._num_oom_kills is not None:
            now = evidence.num_oom_kills()
            if now is not None and now > self._num_oom_kills:
                lines.append("out of memory: the kernel's OOM killer has struck in this cgroup")
                self._num_oom_kills = now
        last = process.logs.last_lines()
        if last:
            lines.append(f"the last lines of {process.logs.stderr}:\n{last}")
        if watch.size(process.logs.stacks) > 0:
            lines.append(f"stacks: {process.logs.stacks}")
        return "\n".join(lines)

    def _lose_zygote(self) -> None:
        """Without it no worker lives, and none can be started: the job is over."""
        if self._done.done():
            return
        cause = self.state.root_cause
        self.console.say(LOST_ZYGOTE)
        self._effects.clear()
        self._events.clear()
        for worker, process in sorted(self.workers.items()):
            process.kill_group()
            self._decide(ev.WorkerExited(worker, -signal.SIGKILL, note=LOST_ZYGOTE))
        self._effects.clear()
        self._done.set_result(ev.Finish(Outcome.UNRECOVERABLE, cause, LOST_ZYGOTE))

    # ------------------------------------------------------------ what workers say

    def _on_worker(self, process: WorkerProcess) -> None:
        try:
            while (message := process.receive()) is not None:
                self._on_message(process, message)
        except wire.WireError as error:
            self.console.say(f"worker {process.worker.number}: {error}")
        except ConnectionError:
            self._lose_zygote()
        if process.is_silent:  # else the loop would call this again and again until it is reaped
            self.loop.remove_reader(process.socket)

    def _on_message(self, process: WorkerProcess, message: wire.FromWorker) -> None:
        worker = process.worker
        if isinstance(message, wire.Ready):
            process.ready = True
            if not self.state.decorated:
                self.zygote.sweep_always()
            self.feed(ev.WorkerReady(worker, message.persisted_step))
        elif isinstance(message, wire.Joined):
            self.feed(ev.WorkerJoined(worker, message.generation))
        elif isinstance(message, wire.Restored):
            self.heritage.restored(worker)
            self.feed(ev.WorkerRestored(worker, message.generation))
        elif isinstance(message, wire.Stepped):
            self.feed(ev.WorkerStepped(worker, message.generation, message.step))
        elif isinstance(message, wire.Persisted):
            self.feed(ev.Persisted(worker, message.step, message.note))
        elif isinstance(message, wire.DrainRequest):
            self.feed(ev.DrainRequested(message.signum))
        else:
            self.feed(_report_of(worker, message))

    # ------------------------------------------------------------ signals

    def _asked_to_stop(self, signum: int) -> None:
        """The first asks, the second forces; the same one twice at once was sent once."""
        now_s = time.monotonic()
        if self._drains and now_s - self._drains[-1][0] < SAME_SIGNAL_S:
            return
        self._drains.append((now_s, signum))
        if self.state.phase.name == "FORMING" and self.state.plan is None:
            # Nothing runs yet.
            self._finish(ev.Finish(Outcome.SIGNALLED, None, "asked to stop before the start"))
            self.state = replace(self.state, draining=signum)
            return
        self.feed(ev.DrainRequested(signum, force=len(self._drains) > 1))

    def _forward(self, signum: int) -> None:
        for process in self.workers.values():
            process.kill(signum)

    # ------------------------------------------------------------ what sends nothing

    def _poll(self) -> None:
        if self._done.done():
            return
        self.loop.call_later(POLL_S, self._poll)
        now_s = time.monotonic()
        findings = self.detector.observe((watch.pulse(p) for p in self.workers.values()), now_s)
        if findings.pace is not None:
            self.feed(findings.pace)
        if findings.hung is not None and self.options.detect_hangs:
            self.feed(watch.with_process_states(findings.hung, self.workers, self.state.plan))
        if now_s - self._shown_s >= SHOW_S and self.state.decorated:
            self._shown_s = now_s
            self.console.show(self.describe(), self.state.usual_step_s)

    def describe(self) -> dict[str, Any]:
        """For `resilient status` and the progress line."""
        plan = self.state.plan
        members = plan.members if plan is not None else ()
        living = {m.rank: self.workers[m.worker] for m in members if m.worker in self.workers}
        return {
            "phase": self.state.phase.value,
            "generation": plan.generation if plan is not None else -1,
            "world_size": plan.world_size if plan is not None else 0,
            "steps": {rank: process.page.read().step for rank, process in living.items()},
            "recoveries": self._num_recoveries,
            "spares": sum(1 for process in self.workers.values() if process.slot is None),
            "pids": {rank: process.pid for rank, process in living.items()},
            "since_s": round(time.monotonic() - self._start_s, 3),
        }


def _report_of(
    worker: Worker, message: wire.Interrupted | wire.Failed | wire.Finished
) -> ev.WorkerInterrupted | ev.WorkerFailed | ev.WorkerFinished:
    known = (message.generation, message.step)
    persisted_step = message.persisted_step
    if isinstance(message, wire.Failed):
        return ev.WorkerFailed(
            worker,
            *known,
            error=message.error,
            in_collective=message.in_collective,
            holdings=message.holdings,
            persisted_step=persisted_step,
        )
    event = ev.WorkerFinished if isinstance(message, wire.Finished) else ev.WorkerInterrupted
    return event(worker, *known, holdings=message.holdings, persisted_step=persisted_step)
