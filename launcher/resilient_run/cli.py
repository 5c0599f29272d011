"""The command line of `resilient-run`: torchrun's, plus a group of its own.

The one idea: torchrun's own parser is used, so that every option means what it means there, in the
torch that is installed; then everything is checked before any process exists. What the user has got
wrong is one line and exit code 2.

The order of things in `main` matters: the zygote is forked when the options are known and before
anything has started a thread; a new worker comes back out of that call.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import gc
import importlib.util
import math
import os
import shutil
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from resilient.errors import ConfigError

EXIT_CONFIG, EXIT_BUG = 2, 70
DEFAULT_GRACE_S = 30.0
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; in a worker, that of the user's script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    # Before torch is imported, which reads it: each abort would make it print pages of C++ stacks.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    # Imports make a million objects that stay, and nothing to collect; looking for it would be a
    # fifth of their time. Zygote and agent go on collecting when they have imported everything.
    gc.disable()
    try:
        with _single_threaded_blas():
            options = parse(arguments)
    except BaseException as error:
        gc.enable()
        if isinstance(error, ConfigError):
            return _fail(error)
        raise
    from resilient_run import bootstrap, zygote

    started = zygote.start(options.launch)
    if isinstance(started, zygote.Child):
        return bootstrap.run(options.launch, started)
    return _run_agent(options, *started)


def _run_agent(options: Any, zygote_pid: int, channel: socket.socket) -> int:
    from resilient_run.agent import Agent
    from resilient_run.workers import ZygoteChannel

    gc.freeze()  # no collection of what was imported, a tenth of a second, in the middle of a fault
    gc.enable()
    try:
        return Agent(options, ZygoteChannel(zygote_pid, channel)).run()
    except ConfigError as error:
        return _fail(error)
    except Exception:
        import traceback

        traceback.print_exc()
        print("resilient-run: error: this is a bug of resilient-run's", file=sys.stderr)
        return EXIT_BUG


def _fail(error: ConfigError) -> int:
    text = " ".join(str(error).split())
    print(f"resilient-run: error: {text}", file=sys.stderr)
    return EXIT_CONFIG


@contextlib.contextmanager
def _single_threaded_blas() -> Iterator[None]:
    """numpy, which torch imports, starts a thread otherwise, and then nothing can be forked."""
    name = "OPENBLAS_NUM_THREADS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before


# ---------------------------------------------------------------- the parser


def make_parser() -> argparse.ArgumentParser:
    """torchrun's parser with our group added and its messages made one line."""
    from torch.distributed.argparse_util import env
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "resilient-run"
    parser.description = (
        "Launches a distributed training script and keeps it going: takes every option of "
        "torchrun; a script whose main function is decorated with @resilient.train survives the "
        "loss of its ranks."
    )
    parser.error = _one_line_error  # type: ignore[method-assign]
    known = {option for action in parser._actions for option in action.option_strings}
    for action in parser._actions:
        if action.dest == "start_method":
            action.choices = ["fork", "spawn", "forkserver"]
            action.default = os.environ.get("PET_START_METHOD", "fork")
            action.help = (
                "fork (the default): workers are forked from a process that has torch imported; "
                "spawn: each is a fresh interpreter, for scripts that cannot be forked. "
                "forkserver is the same as fork."
            )
    group = parser.add_argument_group("fault tolerance")

    def add(name: str, **details: Any) -> None:
        aliases = sorted({f"--{name}", f"--{name.replace('-', '_')}"})
        if not known.intersection(aliases):
            group.add_argument(*aliases, action=env, **details)

    add("spares", type=int, default=1, metavar="N", help="processes kept ready on each node (1)")
    add("replace", choices=["yes", "no"], default="yes", help="replace a dead rank, or shrink")
    add("min-world-size", type=int, default=1, metavar="N", help="fewer ranks never train (1)")
    add(
        "hang-timeout",
        default="auto",
        metavar="SECONDS",
        help="no progress for so long is a hang; auto (learned, decorated scripts only) or off",
    )
    add("first-step-timeout", type=float, default=300.0, metavar="SECONDS", help="no progress for "
        "so long is a hang in what comes before the second step of a generation: making groups, "
        "building, restoring, the first step (300)")  # fmt: skip
    add("start-timeout", type=float, default=600.0, metavar="SECONDS", help="from the first worker "
        "at the decorator to the last one, when the job starts (600)")  # fmt: skip
    add("checkpoint-dir", default="", metavar="DIR", help="persist here, and go on from here")
    add("checkpoint-every", type=int, default=0, metavar="STEPS", help="how often to persist")
    add("interrupt-timeout", type=float, default=5.0, metavar="SECONDS", help="to leave an aborted "
        "generation, before being killed (5)")  # fmt: skip
    add("kill-timeout", type=float, default=10.0, metavar="SECONDS", help="from SIGKILL to the end "
        "of a process, before its place is left out (10)")  # fmt: skip
    add("rendezvous-timeout", type=float, default=60.0, metavar="SECONDS", help="to wait for "
        "replacements, before going on without (60)")  # fmt: skip
    add("shutdown-timeout", type=int, default=None, metavar="SECONDS", help="from SIGTERM to "
        "SIGKILL, on every path (30)")  # fmt: skip
    group.add_argument(
        "--preload",
        action="append",
        default=[],
        metavar="MODULE",
        help="import it once, before workers are forked; may be repeated",
    )
    group.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="FAULT",
        help="a fire drill, as kill:rank=2,step=40; may be repeated",
    )
    return parser


def _one_line_error(message: str) -> NoReturn:
    raise ConfigError(f"{message} (resilient-run --help lists the options)")


def _check_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Names the first option before the script that does not exist.

    argparse would take its value for the script, and complain of something else.
    """
    known = {option: action for a in parser._actions for option, action in _options(a)}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--" or not argument.startswith("-") or argument == "-":
            return
        name, has_value, _ = argument.partition("=")
        action = known.get(name)
        if action is None and name.startswith("--"):
            matches = {id(known[k]): known[k] for k in known if k.startswith(name)}
            if len(matches) == 1:  # an abbreviation
                (action,) = matches.values()
            elif matches:
                return  # argparse names the candidates
        if action is None and len(argument) > 2 and known.get(argument[:2]) is not None:
            action, has_value = known[argument[:2]], "joined"  # as -r3
        if action is None:
            close = difflib.get_close_matches(name, list(known), n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"unknown option {name}{hint} (resilient-run --help lists the options; those of "
                "the script come after its name)"
            )
        if not has_value and action.nargs != 0:
            next(rest, None)


def _options(action: argparse.Action) -> list[tuple[str, argparse.Action]]:
    return [(option, action) for option in action.option_strings]


# ---------------------------------------------------------------- from arguments to options


def parse(arguments: Sequence[str]) -> Any:
    """The command line as Options.

    Raises:
        ConfigError: something is wrong with it, with the environment, or with the script.
        SystemExit: --help.
    """
    parser = make_parser()
    _check_options(parser, arguments)
    return make_options(parser.parse_args(list(arguments)), tuple(arguments))


def _check_checkpoint_dir(directory: str) -> None:
    """Refuses what can never be written to; workers make the directory itself."""
    place = os.path.abspath(directory)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    if not os.path.isdir(place):
        raise ConfigError(f"--checkpoint-dir {directory}: {place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        raise ConfigError(f"--checkpoint-dir {directory}: {place} cannot be written to")


def make_options(args: argparse.Namespace, argv: tuple[str, ...] = ()) -> Any:
    """Checks everything, and sets OMP_NUM_THREADS as torchrun does."""
    from resilient_run.options import Options

    _check_nodes(args)
    config = _make_config(args)
    config.check()
    launch = _make_launch(args)
    num_slots = _num_slots(args.nproc_per_node)
    if config.min_world_size > num_slots:
        raise ConfigError(
            f"--min-world-size {config.min_world_size} is more than the {num_slots} ranks that "
            "--nproc-per-node gives"
        )
    limits, detect_hangs = _make_limits(args)
    if limits.hang_timeout_s is not None:
        config = replace(config, last_holder_timeout_s=limits.hang_timeout_s)
    if args.checkpoint_every and not args.checkpoint_dir:
        raise ConfigError("--checkpoint-every needs --checkpoint-dir")
    if args.checkpoint_every < 0:
        raise ConfigError("--checkpoint-every must not be negative")
    if args.checkpoint_dir:
        _check_checkpoint_dir(args.checkpoint_dir)
    drills = _check_drills(args.inject, num_slots)
    signals_to_handle = getattr(args, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT")
    signals = _parse_signals(signals_to_handle)
    if num_slots > 1 and "OMP_NUM_THREADS" not in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        print(
            "resilient-run: OMP_NUM_THREADS is not set: it is 1 for each of the "
            f"{num_slots} workers, so that they do not overload the machine",
            file=sys.stderr,
        )
    run_id = args.rdzv_id if args.rdzv_id not in ("", "none") else str(uuid.uuid4())
    return Options(
        launch=launch,
        config=config,
        num_slots=num_slots,
        logs=_make_log_options(args),
        limits=limits,
        run_id=run_id,
        argv=argv,
        role=args.role,
        node=socket.gethostname() or "localhost",
        host=args.local_addr or "127.0.0.1",
        master_port=args.master_port or 0,
        detect_hangs=detect_hangs,
        drills=drills,
        checkpoint_dir=args.checkpoint_dir,
        checkpoint_every=args.checkpoint_every,
        signals_to_handle=signals_to_handle,
        signals=signals,
        virtual_local_rank=bool(getattr(args, "virtual_local_rank", False)),
    )


def _check_nodes(args: argparse.Namespace) -> None:
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
    from torch.distributed.run import parse_min_max_nnodes

    nodes = _translated(parse_min_max_nnodes, args.nnodes, f"--nnodes {args.nnodes}")
    if nodes != (1, 1):
        raise ConfigError(
            f"--nnodes {args.nnodes}: this release runs on one node; more are not there yet"
        )
    if args.node_rank:
        raise ConfigError(f"--node-rank {args.node_rank}: with one node it can only be 0")
    _translated(_parse_rendezvous_config, args.rdzv_conf, f"--rdzv-conf {args.rdzv_conf}")


def _translated(function: Callable[[str], T], value: str, what: str) -> T:
    """Calls one of torchrun's own parsers; what it raises becomes one line."""
    try:
        return function(value)
    except Exception as error:
        text = str(error) or type(error).__name__
        raise ConfigError(f"{what}: {text}") from None


def _make_config(args: argparse.Namespace) -> Any:
    from resilient.core.model import Config

    _check_seconds("--start-timeout", args.start_timeout)
    grace_s = args.shutdown_timeout
    if grace_s is None:
        grace_s = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", DEFAULT_GRACE_S)
    try:
        # 0 means at once, as for torchrun.
        grace = max(float(grace_s), 0.001) if float(grace_s) >= 0 else float(grace_s)
    except ValueError:
        raise ConfigError(
            f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={grace_s}: must be a number of seconds"
        ) from None
    return Config(
        min_world_size=args.min_world_size,
        num_spares=args.spares,
        replace=args.replace == "yes",
        max_restarts=args.max_restarts,
        interrupt_timeout_s=args.interrupt_timeout,
        kill_timeout_s=args.kill_timeout,
        start_timeout_s=args.start_timeout,
        rendezvous_timeout_s=args.rendezvous_timeout,
        grace_s=grace,
        persists=bool(args.checkpoint_dir),
    )


def _check_seconds(option: str, seconds: float) -> None:
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{option} {seconds:g}: must be seconds above 0")


def _make_limits(args: argparse.Namespace) -> tuple[Any, bool]:
    from resilient.core.detector import Limits

    first_s, text = args.first_step_timeout, args.hang_timeout
    _check_seconds("--first-step-timeout", first_s)
    if text in ("auto", "off"):
        return Limits(first_step_timeout_s=first_s), text == "auto"
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise ConfigError(f"--hang-timeout {text}: must be seconds above 0, auto or off")
    return Limits(hang_timeout_s=seconds, first_step_timeout_s=first_s), True


def _make_launch(args: argparse.Namespace) -> Any:
    from resilient_run import scratch
    from resilient_run.zygote import Launch

    target = args.training_script
    if args.no_python and args.module:
        raise ConfigError("--no-python and -m exclude each other: give one of them")
    kind = "command" if args.no_python else "module" if args.module else "script"
    if kind == "command":
        if shutil.which(target) is None:
            raise ConfigError(f"there is no command {target!r} that can be executed")
    elif kind == "module":
        _check_module(target)
    elif not os.path.exists(target):
        raise ConfigError(f"there is no script {target!r} (in {os.getcwd()})")
    elif os.path.isfile(target) and not os.access(target, os.R_OK):
        raise ConfigError(f"the script {target!r} cannot be read")
    elif os.path.isdir(target) and not os.path.exists(os.path.join(target, "__main__.py")):
        raise ConfigError(f"{target!r} is a directory without a __main__.py: give a script")
    method = "fork" if args.start_method == "forkserver" else args.start_method
    python = os.environ.get("PYTHON_EXEC")
    if python and kind != "command":
        method = "spawn"  # another interpreter cannot be forked from this one
    return Launch(
        kind=kind,
        target=target,
        arguments=tuple(args.training_script_args),
        start_method=method,
        python=python or sys.executable,
        preload=tuple(args.preload),
        numa_binding=getattr(args, "numa_binding", None) or "",
        scratch=scratch.new_path(),
    )


def _check_module(name: str) -> None:
    sys.path.insert(0, os.getcwd())
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError, AttributeError):
        spec = None
    finally:
        sys.path.pop(0)
    if spec is None:
        raise ConfigError(f"there is no module {name!r} that python -m could run")


def _num_slots(text: str) -> int:
    """Asks torch in a process that ends: it may initialise CUDA, after which nothing can fork."""
    try:
        number = int(text)
    except ValueError:
        number = _in_child(_determine_num_slots, text)
    if number < 1:
        raise ConfigError(f"--nproc-per-node {text}: must be at least 1")
    return number


def _determine_num_slots(text: str) -> str:
    from torch.distributed.run import determine_local_world_size

    return str(determine_local_world_size(text))


def _in_child(function: Callable[[str], str], argument: str) -> int:
    read_fd, write_fd = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = function(argument)
        except Exception as error:
            answer = f"error: {error}"
        os.write(write_fd, answer.encode()[:4000])
        os._exit(0)
    os.close(write_fd)
    with os.fdopen(read_fd) as file:
        answer = file.read()
    os.waitpid(pid, 0)
    if not answer.isdigit():
        reason = answer.removeprefix("error: ") or "torch gave no answer"
        raise ConfigError(f"--nproc-per-node {argument}: {reason}")
    return int(answer)


def _parse_signals(text: str) -> tuple[int, ...]:
    numbers = []
    for name in filter(None, (part.strip() for part in text.split(","))):
        number = getattr(signal, name, None)
        if not isinstance(number, signal.Signals):
            raise ConfigError(f"--signals-to-handle {text}: there is no signal {name!r}")
        if number in (signal.SIGKILL, signal.SIGSTOP):
            raise ConfigError(f"--signals-to-handle {text}: {name} cannot be handled")
        if number not in (signal.SIGUSR1, signal.SIGUSR2):  # these are always passed on
            numbers.append(int(number))
    return tuple(dict.fromkeys(numbers))


def _check_drills(specs: Sequence[str], num_slots: int) -> tuple[str, ...]:
    if specs:
        from resilient.core import drills

        if len(specs) > drills.MAX_DRILLS:
            raise ConfigError(f"--inject is given {len(specs)} times: {drills.MAX_DRILLS} at most")
        for spec in specs:
            drill = drills.parse(spec)
            rank = getattr(drill, "rank", None)
            if rank is not None and rank >= num_slots:
                raise ConfigError(f"--inject {spec}: there are only {num_slots} ranks (0 is first)")
    return tuple(specs)


def _make_log_options(args: argparse.Namespace) -> Any:
    from torch.distributed.elastic.multiprocessing import Std
    from torch.distributed.run import _get_logs_specs_class

    from resilient_run.logs import LogOptions

    ranks = None
    if args.local_ranks_filter:
        try:
            ranks = set(map(int, args.local_ranks_filter.split(",")))
        except ValueError:
            raise ConfigError(
                f"--local-ranks-filter {args.local_ranks_filter}: must be numbers, as 0,1,2"
            ) from None
    if args.log_dir and args.log_dir != os.devnull and os.path.isfile(args.log_dir):
        raise ConfigError(f"--log-dir {args.log_dir}: is a file")
    specs_class = _translated(
        _get_logs_specs_class, args.logs_specs, f"--logs-specs {args.logs_specs}"
    )
    try:
        specs = specs_class(
            log_dir=args.log_dir,
            redirects=_translated(Std.from_str, args.redirects, f"--redirects {args.redirects}"),
            tee=_translated(Std.from_str, args.tee, f"--tee {args.tee}"),
            local_ranks_filter=ranks,
        )
    except OSError as error:
        raise ConfigError(f"--log-dir {args.log_dir}: {error.strerror or error}") from None
    return LogOptions(
        specs=specs,
        role=args.role,
        prefix=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", ""),
        stdout_filters=tuple(getattr(args, "duplicate_stdout_filters", ())),
        stderr_filters=tuple(getattr(args, "duplicate_stderr_filters", ())),
    )


if __name__ == "__main__":
    sys.exit(main())
