"""What is between an agent and the store: single calls that may get lost, and the stream.

The one idea: a call that is not answered in time says nothing about whether it was carried out, and
a call that comes late is carried out all the same. The stream is a connection: it loses nothing, it
waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from resilient.core import changes as ch
from resilient.sim import store as st

if TYPE_CHECKING:
    from resilient.sim.agent import Agent

Answer = TypeVar("Answer")
Sink = Callable[[Sequence[ch.Change]], None]


class Watch:
    """One watcher of the store's stream: a snapshot, then every change in order.

    A link that is cut makes it wait; it goes on where it was, unless `compacted`: then what it has
    missed is no longer there, and it says so once.
    """

    def __init__(self, agent: Agent, sink: Sink, lost: Callable[[], None]) -> None:
        self._agent = agent
        self._sink = sink
        self._lost = lost
        self._position: int | None = None
        self._scheduled = False
        self.compacted = False
        self.is_closed = False
        self.behind()

    def behind(self) -> None:
        """There may be something to tell, or a link is there again."""
        if not self._scheduled and not self.is_closed:
            self._scheduled = True
            cluster = self._agent.cluster
            self._agent.host.later(cluster.network.latency_s(self._agent.name), self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        cluster = self._agent.cluster
        if self.is_closed or not self._agent.runs:
            return
        network, name = cluster.network, self._agent.name
        is_new = self._position is None
        if not network.can_answer(name) or (is_new and not network.can_request(name)):
            return  # until the cluster says that a link is there again
        if self.compacted:
            self.is_closed = True
            self._lost()
            return
        store = cluster.store
        changes = store.snapshot() if self._position is None else store.log[self._position :]
        self._position = len(store.log)
        if changes:
            self._sink(changes)


def call(
    agent: Agent,
    do: Callable[[], Answer],
    answered: Callable[[Answer], None] | None = None,
    refused: Callable[[st.Refused], None] | None = None,
    lost: Callable[[], None] | None = None,
) -> None:
    """One call: there, done, and back, each of which may fail."""
    cluster, name = agent.cluster, agent.name
    sent_s = cluster.timeline.now_s
    timeout_s = cluster.settings.request_timeout_s

    def give_up() -> None:
        if lost is not None:
            agent.host.later(
                max(0.0, sent_s + timeout_s - cluster.timeline.now_s),
                lambda: lost() if agent.runs else None,
            )

    there_s = cluster.network.latency_s(name)
    if there_s > timeout_s:
        give_up()

    def arrive() -> None:
        is_late = there_s > timeout_s
        if not cluster.network.can_request(name):
            if not is_late:
                give_up()
            return
        error: st.Refused | None = None
        answer: Answer | None = None
        try:
            answer = do()
        except st.Refused as refusal:
            error = refusal
        back_s = cluster.network.latency_s(name)
        if is_late:
            return
        if not cluster.network.can_answer(name) or there_s + back_s > timeout_s:
            give_up()
            return

        def receive() -> None:
            if not agent.runs:
                return
            if error is None:
                if answered is not None:
                    answered(answer)  # type: ignore[arg-type]
                return
            if refused is not None:
                refused(error)

        agent.host.later(back_s, receive)

    cluster.timeline.after(there_s, arrive)
