"""Fire drills: every text is understood or refused, and each kind strikes as it says."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from resilient.core.drills import KINDS, POINTS, Drill, parse
from resilient.errors import ConfigError
from resilient.page import Page
from resilient.worker.drill import DrillError, Drills


def test_texts_that_are_drills() -> None:
    assert parse("kill:rank=2,step=40") == Drill("kill", rank=2, step=40)
    assert parse("exit:code=0,at=after-step,times=inf") == Drill(
        "exit", at="after-step", code=0, times=math.inf
    )
    assert parse("slow:seconds=0.5,generation=1").seconds == 0.5
    assert parse("stop") == Drill("stop")
    for kind in KINDS:
        for at in POINTS:
            if kind != "raise" or at not in ("joining", "stopping", "waiting"):
                assert parse(f"{kind}:at={at}").at == at


@pytest.mark.parametrize(
    "text",
    [
        "",
        "explode:rank=1",
        "kill:rank",
        "kill:rank=-1",
        "kill:rank=1,rank=2",
        "kill:colour=red",
        "kill:at=home",
        "kill:times=0",
        "kill:seconds=inf",
        "kill:seconds=nan",
        "exit:code=256",
        "raise:at=waiting",
        "kill:step=1.5",
    ],
)
def test_texts_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert "\n" not in str(refused.value) and "--inject" in str(refused.value)


def test_a_drill_strikes_where_it_says_and_so_often() -> None:
    page = Page.create()
    drills = Drills(page)
    drills.arm(("", "raise:rank=1,step=3,times=2"), rank=1, generation=0)
    drills.reached("batch", 2)
    drills.reached("after-step", 3)
    assert page.read().drills_fired == 0
    for _ in range(2):
        with pytest.raises(DrillError):
            drills.reached("batch", 3)
    drills.reached("batch", 3)
    assert page.read().drills_fired == 0b10 and page.read().fault_ns > 0
    drills.arm(("", "raise:rank=1,step=3,times=2"), rank=1, generation=1)
    drills.reached("batch", 3)  # the count is the process's
    page.close()


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("kill", -signal.SIGKILL),
        ("segv", -signal.SIGSEGV),
        ("exit", 1),
        ("exit:code=0", 0),
        ("slow:seconds=0.01", 7),
        ("hang-in-python:seconds=0.01", 7),
        ("hang-holding-the-GIL:seconds=0.01", 7),
    ],
)
def test_what_a_process_comes_to(text: str, status: int) -> None:
    assert start(text).wait(60) == status


def test_a_stopped_process_can_go_on() -> None:
    process = start("stop")
    pid, state = os.waitpid(process.pid, os.WUNTRACED)
    assert pid == process.pid and os.WIFSTOPPED(state)
    process.send_signal(signal.SIGCONT)
    assert process.wait(60) == 7


@pytest.mark.parametrize(
    ("text", "others_run"), [("hang-in-python", True), ("hang-holding-the-GIL", False)]
)
def test_who_runs_during_a_hang(tmp_path: Path, text: str, others_run: bool) -> None:
    ticks = tmp_path / "ticks"
    process = start(text, str(ticks))
    try:
        deadline_s = time.monotonic() + 60
        while not (tmp_path / "ticks.struck").exists():
            assert time.monotonic() < deadline_s and process.poll() is None
            time.sleep(0.01)
        assert grows(ticks, 60.0 if others_run else 0.7) == others_run
    finally:
        process.kill()
        process.wait()


def grows(ticks: Path, within_s: float) -> bool:
    """Whether the file gets longer, after what was already on its way when the drill struck."""
    time.sleep(0.2)
    before, deadline_s = ticks.stat().st_size, time.monotonic() + within_s
    while ticks.stat().st_size == before:
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.01)
    return True


def start(text: str, ticks: str = "") -> subprocess.Popen[bytes]:
    """A process that meets the drill and, if it survives, exits with 7. A thread of it ticks."""
    code = f"""
        import sys, threading, time
        sys.path.insert(0, {str(Path(__file__).parents[2])!r})
        from resilient.worker.drill import Drills
        def tick():
            while True:
                with open({ticks!r}, "a") as file:
                    file.write("x")
                time.sleep(0.01)
        if {ticks!r}:
            threading.Thread(target=tick, daemon=True).start()
            open({ticks!r} + ".struck", "w").close()
        drills = Drills(None)
        drills.arm(({text!r},), rank=0, generation=0)
        drills.reached("batch", 0)
        sys.exit(7)
    """
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)])
