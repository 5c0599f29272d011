"""Unmodified scripts run as under torchrun: environment, streams, exit codes, logs, restarts."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.launcher.harness import Launcher, children_of, wait_until

PRINT_ENVIRONMENT = """
import json, os, random, sys, threading
import numpy, torch
os.write(1, (json.dumps({
    "env": dict(os.environ), "argv": sys.argv, "file": __file__, "path": sys.path[0],
    "name": __name__, "main": sys.modules["__main__"].__dict__ is globals(),
    "random": [random.random(), float(numpy.random.rand()), torch.initial_seed()],
    "num_threads": torch.get_num_threads(), "tasks": threading.active_count(),
    "spec": __spec__ is None,
}) + "\\n").encode())
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_script_sees_what_torchrun_shows_it(launch: Launcher, method: str) -> None:
    script = launch.script(PRINT_ENVIRONMENT)
    run = launch("--nproc-per-node", 2, "--start-method", method, "--rdzv-id", "job7",
                 "--max-restarts", 3, "script.py", "--lr", "1")  # fmt: skip
    assert run.wait() == 0, run.stderr
    seen = sorted(map(json.loads, run.stdout.splitlines()), key=lambda one: one["env"]["RANK"])
    assert [one["env"]["RANK"] for one in seen] == ["0", "1"]
    assert len({one["env"]["MASTER_PORT"] for one in seen}) == 1
    for rank, one in enumerate(seen):
        environment = one["env"]
        expected = {
            "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1", "ROLE_RANK": str(rank), "ROLE_NAME": "default",
            "ROLE_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_RUN_ID": "job7",
            "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
            "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        }  # fmt: skip
        assert {name: environment.get(name) for name in expected} == expected
        assert environment["TORCHELASTIC_ERROR_FILE"].endswith(f"attempt_0/{rank}/error.json")
        assert "OPENBLAS_NUM_THREADS" not in environment
        assert "RESILIENT_STACKS_FD" not in environment
        assert one["argv"] == ["script.py", "--lr", "1"]
        assert one["file"] == str(script)
        assert one["path"] == str(launch.base)
        assert (one["name"], one["main"], one["spec"]) == ("__main__", True, True)
        assert (one["num_threads"], one["tasks"]) == (1, 1)
    for first, second in zip(*(one["random"] for one in seen), strict=True):
        assert first != second


def test_collectives_over_the_agents_store(launch: Launcher) -> None:
    launch.script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.ones(2) * (dist.get_rank() + 1)\n"
        "dist.all_reduce(t)\n"
        "print(t.tolist())\n"
        "dist.destroy_process_group()\n"
    )
    run = launch("--nproc-per-node", 3, "script.py")
    assert run.wait() == 0, run.stderr
    assert run.stdout.count("[6.0, 6.0]") == 3


def test_module_and_directory(launch: Launcher) -> None:
    package = launch.base / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    text = "import sys\nprint(__name__, __package__, sys.argv[1:], sys.path[0], __file__)\n"
    (package / "__main__.py").write_text(text)
    run = launch("-m", "package", "x")
    assert run.wait() == 0, run.stderr
    expected = f"__main__ package ['x'] {launch.base} {package / '__main__.py'}\n"
    assert run.stdout == expected
    run = launch("package", "x")
    assert run.wait() == 0, run.stderr
    assert run.stdout.startswith("__main__  ['x'] ")


def test_command(launch: Launcher) -> None:
    shell = "echo $RANK of $WORLD_SIZE; test -z $RESILIENT_WORKER_FDS; exit $((RANK * 5))"
    run = launch("--no-python", "--nproc-per-node", 2, "sh", "-c", shell)
    assert run.wait() == 5
    assert "1 of 2\n" in run.stdout


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_traceback_begins_with_the_script_and_is_kept(launch: Launcher, method: str) -> None:
    launch.script("def f():\n    raise ValueError('no such luck')\nprint('first')\nf()\n")
    run = launch("--start-method", method, "script.py")
    assert run.wait() == 1
    assert run.stdout == "first\n"
    head = f'Traceback (most recent call last):\n  File "{launch.base}/script.py", line 4, in'
    assert run.stderr.startswith(head), run.stderr
    error = json.loads((run.logs / "attempt_0/0/error.json").read_text())
    assert error["message"]["message"] == "ValueError: no such luck"
    (exited,) = run.events("WorkerExited")
    assert exited["event"]["error"]["type_name"] == "builtins.ValueError"
    assert exited["event"]["error"]["frame"] == f"{launch.base}/script.py:2 in f"


@pytest.mark.parametrize(
    ("ending", "status", "runs_exit_handlers"),
    [
        ("sys.exit(7)", 7, True),
        ("sys.exit('a word')", 1, True),
        ("os._exit(9)", 9, False),
        ("os.kill(os.getpid(), 9)", 128 + 9, False),
        ("import ctypes; ctypes.string_at(0)", 128 + 11, False),
        ("raise KeyboardInterrupt", 128 + 2, True),
        ("threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()", 0, True),
    ],
)
def test_exit_code_is_that_of_the_root_cause(
    launch: Launcher, ending: str, status: int, runs_exit_handlers: bool
) -> None:
    launch.script(
        "import atexit, os, sys, threading, time\n"
        "if os.environ['RANK'] == '1':\n"
        "    atexit.register(lambda: print('bye'))\n"
        f"    {ending}\n"
        f"elif {status}:\n"
        "    time.sleep(60)\n"
    )
    run = launch("--nproc-per-node", 2, "script.py")
    assert run.wait() == status, run.stderr
    assert ("bye" in run.stdout) is runs_exit_handlers
    if status:
        assert "rank 1" in run.stderr
    else:
        assert "late" in run.stdout
        assert run.stderr == ""


def test_a_restart_is_fresh_and_keeps_the_logs(launch: Launcher) -> None:
    launch.script(
        "import os, sys, torch, torch.distributed as dist\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "dist.init_process_group('gloo')\n"
        "t = torch.ones(1); dist.all_reduce(t)\n"
        "print('attempt', attempt, t.item(), flush=True)\n"
        "dist.barrier()\n"
        "if attempt < 2 and dist.get_rank() == 1: os._exit(3)\n"
        "dist.barrier()\n"
    )
    run = launch("--nproc-per-node", 3, "--max-restarts", 2, "-r", "3", "script.py")
    assert run.wait() == 0, run.stderr
    for attempt in range(3):
        for rank in range(3):
            path = run.logs / f"attempt_{attempt}" / str(rank) / "stdout.log"
            assert path.read_text() == f"attempt {attempt} 3.0\n"
    started = [effect["plan"]["store"] for effect in run.effects("StartWorker")]
    assert len({tuple(store) for store in started}) == 3


def test_tee_redirect_and_filter(launch: Launcher) -> None:
    launch.script("import os, sys\nprint('line', os.environ['RANK'])\nsys.stderr.write('err\\n')\n")
    run = launch("--nproc-per-node", 2, "--role", "trainer", "-t", "1", "-r", "2",
                 "--local-ranks-filter", "1", "script.py")  # fmt: skip
    assert run.wait() == 0, run.stderr
    assert run.stdout == "[trainer1]:line 1\n"
    assert run.stderr == ""
    for rank in range(2):
        assert (run.logs / f"attempt_0/{rank}/stdout.log").read_text() == f"line {rank}\n"
        assert (run.logs / f"attempt_0/{rank}/stderr.log").read_text() == "err\n"


IGNORES_SIGTERM = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print('term', flush=True))
print('up', flush=True)
if len(sys.argv) > 1 and os.environ['RANK'] == '0':
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(4)
time.sleep(60)
time.sleep(60)
"""


def test_the_grace_time_holds_when_a_peer_fails(launch: Launcher) -> None:
    launch.script(IGNORES_SIGTERM)
    run = launch("--nproc-per-node", 2, "--shutdown-timeout", 1, "script.py", "go")
    run.wait_line("up", 2)
    (launch.base / "go").touch()
    assert run.wait() == 4
    failed, killed = run.events("WorkerExited")
    assert 1.0 <= killed["now"] - failed["now"] < 4.0
    assert "term" in run.stdout


def test_asked_to_stop(launch: Launcher) -> None:
    launch.script(IGNORES_SIGTERM)
    run = launch("--nproc-per-node", 2, "--shutdown-timeout", 1, "script.py")
    run.wait_line("up", 2)
    run.signal(signal.SIGTERM)
    assert run.wait() == 143
    assert run.stdout.count("term") == 2


def test_asked_to_stop_twice(launch: Launcher) -> None:
    launch.script(IGNORES_SIGTERM.replace("SIGTERM", "SIGINT"))
    run = launch("--nproc-per-node", 2, "script.py")
    run.wait_line("up", 2)
    run.signal(signal.SIGINT)
    run.wait_line("term", 2)
    asked_s = time.monotonic()
    # The same signal within half a second counts once, so the second may need a second attempt.
    wait_until(lambda: run.events("DrainRequested")[1:] or run.signal(signal.SIGINT), "forced")
    assert run.wait() == 130
    assert time.monotonic() - asked_s < 10


def test_user_signals_are_passed_on(launch: Launcher) -> None:
    launch.script(
        "import os, signal\n"
        "line = b'usr1 ' + os.environb[b'RANK'] + b'\\n'\n"
        "signal.signal(signal.SIGUSR1, lambda *_: os.write(1, line))\n"  # print() writes by words
        "print('up', flush=True)\n"
        "signal.pause()\n"
    )
    run = launch("--nproc-per-node", 2, "script.py")
    run.wait_line("up", 2)
    run.signal(signal.SIGUSR1)
    assert run.wait() == 0, run.stderr
    assert sorted(run.stdout.splitlines()[2:]) == ["usr1 0", "usr1 1"]


def test_a_hang_is_found_by_optimizer_steps(launch: Launcher) -> None:
    launch.script(
        "import os, time, torch\n"
        "p = torch.nn.Parameter(torch.zeros(1)); p.grad = torch.zeros(1)\n"
        "optimizer = torch.optim.SGD([p])\n"
        "for i in range(5): optimizer.step(); time.sleep(0.2)\n"
        "def stuck():\n"
        "    while True: time.sleep(0.001)\n"
        "stuck()\n"
    )
    run = launch("--hang-timeout", 1, "--shutdown-timeout", 1, "script.py")
    assert run.wait() == 128 + 9
    assert "no progress" in run.stderr
    stacks = (run.logs / "attempt_0/0/stacks.txt").read_text()
    assert "script.py" in stacks and "in stuck" in stacks


LEAVES_CHILDREN = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"])
if os.fork() == 0:
    time.sleep(300)
print('up', flush=True)
time.sleep(300)
"""


def test_nothing_is_left_of_a_worker_that_was_killed(launch: Launcher) -> None:
    launch.script(LEAVES_CHILDREN)
    run = launch("--nproc-per-node", 2, "script.py")
    run.wait_line("up", 2)
    launch.note_processes()
    assert len(launch.left()) == 7  # the zygote, two workers, two children each
    os.kill(run.pids()[1], signal.SIGKILL)
    assert run.wait() == 128 + 9
    assert "rank 1" in run.stderr
    wait_until(lambda: not launch.left(), "all gone", launch.left)


@pytest.mark.parametrize("victim", ["agent", "zygote"])
def test_nothing_is_left_when_we_are_killed(launch: Launcher, victim: str) -> None:
    launch.script(LEAVES_CHILDREN)
    run = launch("--nproc-per-node", 2, "script.py")
    run.wait_line("up", 2)
    launch.note_processes()
    assert len(launch.left()) == 7
    os.kill(run.pid if victim == "agent" else children_of(run.pid)[0], signal.SIGKILL)
    assert run.wait() == (-9 if victim == "agent" else 70)
    if victim == "zygote":
        assert "zygote" in run.stderr
    wait_until(lambda: not launch.left(), "all gone", launch.left)


def test_status_while_it_runs(launch: Launcher) -> None:
    launch.script("print('up', flush=True)\nimport time\ntime.sleep(300)\n")
    run = launch("--nproc-per-node", 2, "script.py")
    run.wait_line("up", 2)
    status = run.ask_status()
    assert (status["phase"], status["world_size"]) == ("forming", 2)
    assert sorted(status["pids"]) == ["0", "1"]
    assert {"generation", "steps", "recoveries", "spares", "since_s"} <= status.keys()
