"""Memory of what is there besides the ranks: the agent, the zygote and a spare.

The agent and the zygote share most of what they have imported, and the zygote shares it with the
workers forked from it. So pages are counted, each once: *together* is the number of distinct
physical pages that the agent and the zygote map (/proc/PID/pagemap, for root; else the sum of both
resident sizes, an upper bound). A spare counts by the pages that no other process maps (its USS).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Iterable
from pathlib import Path

import psutil
from common import WORKLOAD, command_of, environment

from resilient.core.events import WorkerReady
from resilient.report import find_journal, read_journal

NUM_RANKS = 4
TOGETHER_MB, SPARE_MB = 600, 150
START_TIMEOUT_S = 60
PRESENT, FRAME = 1 << 63, (1 << 55) - 1


def frames(pid: int) -> set[int]:
    """Numbers of the physical pages that a process maps; empty where they are hidden."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    found: set[int] = set()
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/pagemap", "rb", 0) as pagemap:
        for line in maps:
            start, end = (int(bound, 16) for bound in line.split()[0].split("-"))
            try:
                data = os.pread(
                    pagemap.fileno(), (end - start) // page_bytes * 8, start // page_bytes * 8
                )
            except (OSError, OverflowError):
                continue  # [vsyscall] has no entries
            words = array("Q")
            words.frombytes(data[: len(data) // 8 * 8])
            found.update(word & FRAME for word in words if word & PRESENT)
    found.discard(0)
    return found


def together_bytes(processes: Iterable[psutil.Process]) -> tuple[int, str]:
    """Distinct memory of several processes, and how that was found."""
    processes = list(processes)
    try:
        counted = set().union(*(frames(process.pid) for process in processes))
    except PermissionError:
        counted = set()
    if counted:
        return len(counted) * os.sysconf("SC_PAGE_SIZE"), "distinct pages"
    return sum(p.memory_info().rss for p in processes), "sum of resident sizes, an upper bound"


def wait_trained(out: Path, agent: psutil.Process) -> tuple[psutil.Process, psutil.Process]:
    """Waits until every rank has trained and a spare is at the decorator.

    Returns:
        The zygote and the spare.
    """
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s:
        time.sleep(0.2)
        ranks = {
            int(path.stem.split("-")[2])
            for path in out.glob("steps-*.txt")
            if path.read_bytes().count(b"\n") >= 5
        }
        if len(ranks) < NUM_RANKS or not spare_ready(out / "logs"):
            continue
        for zygote in agent.children():
            spares = [child for child in zygote.children() if child.pid not in ranks]
            if spares:
                return zygote, spares[0]
    raise SystemExit(f"no {NUM_RANKS} ranks and a spare within {START_TIMEOUT_S} s")


def spare_ready(logs: Path) -> bool:
    """Whether a worker that was started without a slot has said that it waits."""
    spares, ready = set(), set()
    for record in read_journal(find_journal(str(logs))).records:
        for effect in record.effects_of("StartWorker"):
            if effect["slot"] is None:
                spares.add(tuple(effect["worker"]))
        if isinstance(record.event, WorkerReady):
            ready.add(tuple(record.event.worker))
    return bool(spares & ready)


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    with tempfile.TemporaryDirectory(prefix="resilient-bench-") as directory:
        out = Path(directory, "run")
        out.mkdir()
        command = [*command_of("resilient-run"), f"--nproc-per-node={NUM_RANKS}"]
        command += [f"--log-dir={out / 'logs'}", str(WORKLOAD), "--mode=decorated"]
        command += [f"--out={out}", "--steps=100000", "--pause-ms=20"]
        process = subprocess.Popen(
            command, env=environment(), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            agent = psutil.Process(process.pid)
            zygote, spare = wait_trained(out, agent)
            total, how = together_bytes([agent, zygote])
            for name, one in (("agent", agent), ("zygote", zygote)):
                info = one.memory_full_info()
                print(f"{name:8s} resident {info.rss / 1e6:.0f} MB, own {info.uss / 1e6:.0f} MB")
            print(f"agent and zygote together {total / 1e6:.0f} MB ({how}); limit {TOGETHER_MB} MB")
            own = spare.memory_full_info().uss
            print(f"spare, own {own / 1e6:.0f} MB; limit {SPARE_MB} MB")
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    if total > TOGETHER_MB * 1e6 or own > SPARE_MB * 1e6:
        sys.exit(1)


if __name__ == "__main__":
    main()
