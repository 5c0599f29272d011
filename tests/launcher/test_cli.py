"""Bad input is one line and exit code 2; torchrun's options are all there and mean the same."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from resilient.errors import ConfigError
from resilient_run import cli
from tests.launcher.harness import ROOT, Launcher


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", raising=False)
    path = tmp_path / "script.py"
    path.write_text("print('it ran', flush=True)\n")
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--sparse 2 script.py", "unknown option --sparse; did you mean --spares?"),
        ("--frobnicate script.py", "unknown option --frobnicate ("),
        ("", "required: training_script"),
        ("nowhere.py", "there is no script 'nowhere.py'"),
        (".", "is a directory without a __main__.py"),
        ("-m nowhere.at_all", "there is no module 'nowhere.at_all'"),
        ("--no-python nowhere", "there is no command 'nowhere'"),
        ("--no-python -m script", "exclude each other"),
        ("--nnodes 2 script.py", "--nnodes 2: this release runs on one node"),
        ("--nnodes 1:4 script.py", "--nnodes 1:4: this release runs on one node"),
        ("--nnodes many script.py", "--nnodes many: "),
        ("--node-rank 1 script.py", "--node-rank 1"),
        ("--nproc-per-node 0 script.py", "must be at least 1"),
        ("--nproc-per-node lots script.py", "Unsupported nproc_per_node value: lots"),
        ("--nproc-per-node gpu script.py", "Cuda is not available"),
        ("--nproc-per-node 2 --min-world-size 3 script.py", "more than the 2 ranks"),
        ("--min-world-size 0 script.py", "--min-world-size must be at least 1"),
        ("--spares -1 script.py", "must not be negative"),
        ("--spares some script.py", "invalid int value: 'some'"),
        ("--replace perhaps script.py", "invalid choice: 'perhaps'"),
        ("--interrupt-timeout 20 script.py", "interrupt < kill < rendezvous"),
        ("--shutdown-timeout -1 script.py", "greater than 0"),
        ("--hang-timeout soon script.py", "must be seconds above 0, auto or off"),
        ("--hang-timeout 0 script.py", "must be seconds above 0, auto or off"),
        ("--first-step-timeout 0 script.py", "--first-step-timeout 0: must be seconds above 0"),
        ("--first-step-timeout inf script.py", "--first-step-timeout inf: must be seconds"),
        ("--first-step-timeout soon script.py", "invalid float value: 'soon'"),
        ("--start-timeout -1 script.py", "--start-timeout -1: must be seconds above 0"),
        ("--start-timeout nan script.py", "--start-timeout nan: must be seconds above 0"),
        ("--checkpoint-every 5 script.py", "needs --checkpoint-dir"),
        ("--inject explode:rank=1 script.py", "unknown kind 'explode'"),
        ("--inject kill:rank=1 script.py", "there are only 1 ranks"),
        ("--signals-to-handle SIGFOO script.py", "there is no signal 'SIGFOO'"),
        ("--signals-to-handle SIGKILL script.py", "cannot be handled"),
        ("--redirects 7 script.py", "--redirects 7"),
        ("--local-ranks-filter a script.py", "must be numbers"),
        ("--log-dir script.py script.py", "is a file"),
        ("--checkpoint-dir script.py script.py", "is not a directory"),
        ("--checkpoint-dir script.py/ck script.py", "is not a directory"),
        ("--rdzv-conf nonsense script.py", "--rdzv-conf nonsense"),
        ("--logs-specs nobody script.py", "nobody"),
    ],
)
def test_one_line_says_what_is_wrong(
    script: Path, arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("resilient-run: error: "), printed.err
    assert printed.err.count("\n") == 1
    assert message in printed.err


def test_every_option_of_torchrun_is_taken(script: Path, tmp_path: Path) -> None:
    options = cli.parse(
        f"--standalone --nnodes 1:1 --nproc_per_node 2 --rdzv-backend c10d --rdzv-id x7 "
        f"--rdzv-conf timeout=5 --max-restarts 3 --monitor-interval 1 --start-method forkserver "
        f"--event-log-handler null --role r --log-dir {tmp_path / 'logs'} -r 3 -t 0:1 "
        f"--local-ranks-filter 0,1 --duplicate-stdout-filters a,b --node-rank 0 "
        f"--master-addr 127.0.0.1 --master-port 29777 --local-addr localhost "
        f"--signals-to-handle SIGTERM,SIGUSR1 --shutdown-timeout 7 --run-path --virtual-local-rank "
        f"{script} --own 1".split()
    )
    assert options.num_slots == 2
    assert (options.launch.kind, options.launch.target) == ("script", str(script))
    assert options.launch.arguments == ("--own", "1")
    assert options.launch.start_method == "fork"
    assert (options.run_id, options.role) == ("x7", "r")
    assert (options.host, options.master_port) == ("localhost", 29777)
    assert (options.config.max_restarts, options.config.grace_s) == (3, 7.0)
    assert options.signals == (signal.SIGTERM,)
    assert options.logs.stdout_filters == ("a", "b")
    assert options.virtual_local_rank


def test_own_options(script: Path, tmp_path: Path) -> None:
    options = cli.parse(
        f"--nproc-per-node 4 --spares 2 --replace no --min-world-size 3 --preload json "
        f"--preload csv --hang-timeout 12.5 --inject kill:rank=3,step=4 --inject stop:rank=0 "
        f"--checkpoint-dir ck --checkpoint-every 9 --interrupt-timeout 1 --kill-timeout 2 "
        f"--rendezvous-timeout 3 --first-step-timeout 77 --start-timeout 88 "
        f"--log-dir {tmp_path / 'logs'} script.py".split()
    )
    config = options.config
    assert (config.num_spares, config.replace, config.min_world_size) == (2, False, 3)
    bounds = (config.interrupt_timeout_s, config.kill_timeout_s, config.rendezvous_timeout_s)
    assert bounds == (1, 2, 3)
    assert options.launch.preload == ("json", "csv")
    assert options.limits.hang_timeout_s == 12.5
    assert options.limits.first_step_timeout_s == 77
    assert config.start_timeout_s == 88
    assert options.drills == ("kill:rank=3,step=4", "stop:rank=0")
    assert (options.checkpoint_dir, options.checkpoint_every, config.persists) == ("ck", 9, True)


def test_the_environment_gives_defaults_and_a_flag_beats_it(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_SPARES", "3")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "2")
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path / "logs"))
    assert cli.parse(["script.py"]).config.num_spares == 3
    assert cli.parse(["script.py"]).num_slots == 2
    assert cli.parse(["--spares", "0", "script.py"]).config.num_spares == 0


@pytest.mark.parametrize("text", ["auto", "5"])
def test_only_its_own_option_shortens_the_first_step(script: Path, text: str) -> None:
    """A replacement may have to compile, whatever a step may take."""
    logs = str(script.parent / "logs")
    options = cli.parse(["--hang-timeout", text, "--log-dir", logs, "script.py"])
    assert options.limits.first_step_timeout_s == 300
    assert options.config.start_timeout_s == 600


@pytest.mark.parametrize("text", ["cpu", "auto"])
def test_number_of_workers_by_device(script: Path, tmp_path: Path, text: str) -> None:
    options = cli.parse(["--nproc-per-node", text, "--log-dir", str(tmp_path / "l"), "script.py"])
    import torch

    if text == "cpu" or not torch.accelerator.is_available():
        assert options.num_slots == os.cpu_count()
    else:
        assert options.num_slots == torch.accelerator.device_count()


def test_omp_num_threads_as_torchrun(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_LOG_DIR", str(tmp_path / "logs"))
    monkeypatch.delenv("OMP_NUM_THREADS")
    cli.parse(["script.py"])
    assert "OMP_NUM_THREADS" not in os.environ
    cli.parse(["--nproc-per-node", "2", "script.py"])
    assert os.environ["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    cli.parse(["--nproc-per-node", "2", "script.py"])
    assert os.environ["OMP_NUM_THREADS"] == "5"


def test_preload_that_fails_or_starts_threads(launch: Launcher) -> None:
    launch.script("print('it ran', flush=True)\n")
    launch.script("import threading, time\n"
                  "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n",
                  "threads.py")  # fmt: skip
    launch.script("VALUE = object()\n", "good.py")
    for name, message in (("absent_module", "cannot be imported"), ("threads", "starts threads")):
        run = launch("--preload", name, "script.py")
        assert run.wait() == 2
        assert run.stderr.startswith(f"resilient-run: error: --preload {name}: ")
        assert message in run.stderr and run.stderr.count("\n") == 1
        assert run.stdout == ""
    launch.script("import sys; print('good' in sys.modules)\n")
    run = launch("--preload", "good", "script.py")
    assert run.wait() == 0, run.stderr
    assert run.stdout == "True\n"


def test_master_port_is_taken_or_refused(launch: Launcher) -> None:
    launch.script("import os; print(os.environ['MASTER_PORT'])\n")
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        run = launch("--master-port", port, "script.py")
        assert run.wait() == 2
        assert f"--master-port {port} cannot be used" in run.stderr
        assert run.stderr.count("\n") == 1
    run = launch("--master-port", port, "script.py")
    assert run.wait() == 0, run.stderr
    assert run.stdout == f"{port}\n"


def test_the_command_itself(tmp_path: Path) -> None:
    """Once without the warm server: imports, the zygote's threads, the end."""
    (tmp_path / "script.py").write_text("print('it ran', flush=True)\n")
    environment: dict[str, Any] = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}"}
    command = [sys.executable, "-m", "resilient_run", "--log-dir", "logs", "script.py"]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "it ran\n", "")


def test_help_names_both_groups(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert "--nproc-per-node" in text and "fault tolerance" in text and "--inject" in text


def test_a_config_error_is_what_parse_raises(script: Path) -> None:
    with pytest.raises(ConfigError):
        cli.parse(["--nnodes", "3", "script.py"])
