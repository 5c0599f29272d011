"""What happens in a worker before the user's script, and after an exception leaves it.

The one idea: the script must not be able to tell that it was forked. It finds the `sys.argv`,
`sys.path[0]`, `__main__`, unbuffered streams and random states it would find under `python -u
script`, and its traceback begins with its own first line.

Besides, every worker gets what the agent looks at it with: stacks of all threads on a real-time
signal (faulthandler, so that a held GIL does not matter), a sign of progress at each optimizer
step, and an error file when an exception ends it.
"""

from __future__ import annotations

import faulthandler
import importlib.machinery
import importlib.util
import io
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from typing import Any

from resilient.page import Page
from resilient_run import scratch
from resilient_run.zygote import Child, Fork, Launch, die_with_parent, set_first_path

STACKS_SIGNAL = signal.SIGRTMIN + 4


def run(launch: Launch, child: Child) -> int:
    """Runs the user's script in this process, which was forked for it.

    Returns:
        The exit code after an exception or a normal end; SystemExit passes.
    """
    page = _observe(child)
    # All workers have inherited one random state; fresh processes would have seeded themselves.
    # (Python's own is seeded again at each fork.)
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
        _take_num_threads()
        _tick_at_optimizer_steps(page)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    _unbuffer_streams()
    set_first_path(launch)
    return _run_script(launch, child)


def run_spawned() -> None:
    """The same in a fresh interpreter: `python -u -c ... KIND NUMA TARGET ARGUMENTS...`."""
    kind, numa_binding, target, *arguments = sys.argv[1:]
    sockets, stacks_fd = os.environ["RESILIENT_WORKER_FDS"], os.environ["RESILIENT_STACKS_FD"]
    socket_fd, page_fd = map(int, sockets.split(","))
    local_rank = os.environ.get("LOCAL_RANK")
    request = Fork(0, {}, local_rank=int(local_rank) if local_rank else None)
    launch = Launch(kind, target, tuple(arguments), "spawn", numa_binding=numa_binding)
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, "")  # set_first_path puts the right one there
    child = Child(request, socket_fd, page_fd, int(stacks_fd))
    page = _observe(child)
    try:
        import torch  # noqa: F401  # the script is going to, in all likelihood
    except ImportError:
        pass
    else:
        _tick_at_optimizer_steps(page)
    set_first_path(launch)
    sys.exit(_run_script(launch, child))


# ---------------------------------------------------------------- what the agent sees


def _observe(child: Child) -> Page:
    for fd in (child.socket_fd, child.page_fd, child.stacks_fd):
        os.set_inheritable(fd, False)
    # The worker side pops RESILIENT_WORKER_FDS when it comes to it; this one is nobody else's.
    os.environ.pop("RESILIENT_STACKS_FD", None)
    faulthandler.enable(file=child.stacks_fd, all_threads=True)
    faulthandler.register(STACKS_SIGNAL, file=child.stacks_fd, all_threads=True)
    _take_children_along()
    scratch.use_in_this_process()
    return Page(child.page_fd)


def _take_children_along() -> None:
    """Has processes that the main thread forks (data-loader workers, mostly) die with this one.

    Only children, not theirs: a script that makes a daemon by forking twice keeps it. Only the
    main thread's, since the kernel sends the signal when the forking *thread* ends.
    """
    worker_pid, main_thread = os.getpid(), threading.get_ident()
    forking_pid = 0

    def before() -> None:
        nonlocal forking_pid
        forking_pid = os.getpid()

    def after_in_child() -> None:
        scratch.note_this_process()
        if forking_pid == worker_pid and threading.get_ident() == main_thread:
            die_with_parent(worker_pid)

    os.register_at_fork(before=before, after_in_child=after_in_child)


def _tick_at_optimizer_steps(page: Page) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook

    tick = page.tick

    def hook(optimizer: Any, args: Any, kwargs: Any) -> None:
        tick()

    register_optimizer_step_post_hook(hook)


# ---------------------------------------------------------------- as in a fresh interpreter


def _take_num_threads() -> None:
    """OpenMP has read OMP_NUM_THREADS when torch was imported, before it was set for workers."""
    import torch

    value = os.environ.get("OMP_NUM_THREADS", "")
    if value.isdigit() and int(value) > 0 and torch.get_num_threads() != int(value):
        torch.set_num_threads(int(value))


def _unbuffer_streams() -> None:
    for name, fd in (("stdout", 1), ("stderr", 2)):
        old = getattr(sys, f"__{name}__")
        encoding, errors = ("utf-8", "strict") if old is None else (old.encoding, old.errors)
        if name == "stderr":
            errors = "backslashreplace"
        raw = io.FileIO(fd, "w", closefd=False)
        new = io.TextIOWrapper(
            raw,  # type: ignore[arg-type]  # what python -u does: no buffer in between
            encoding=encoding,
            errors=errors,
            newline="\n",
            write_through=True,
        )
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)


def _bind_to_numa_node(launch: Launch, local_rank: int | None) -> None:
    if launch.numa_binding and local_rank is not None:
        from torch.numa import binding

        binding._maybe_apply_numa_binding_to_current_process(
            gpu_index=local_rank,
            numa_options=binding.NumaOptions(binding.AffinityMode(launch.numa_binding)),
        )


# ---------------------------------------------------------------- the script


def _run_script(launch: Launch, child: Child) -> int:
    try:
        _bind_to_numa_node(launch, child.request.local_rank)
        execute = _prepare(launch)
        execute()
        return 0
    except SystemExit:
        raise
    except KeyboardInterrupt as error:
        # As `python script` ends: traceback, normal shutdown, then death by SIGINT, which is what
        # the interpreter does with one that nobody caught. Its own traceback would show us.
        _report(error)
        sys.excepthook = lambda *_: None
        raise
    except BaseException as error:
        _report(error)
        return 1


def _prepare(launch: Launch) -> Callable[[], object]:
    """Makes the new `__main__` and returns what runs it."""
    sys.argv = [launch.target, *launch.arguments]
    if launch.kind == "module":
        spec = _find_main_spec(launch.target)
        loader: Any = spec.loader
        sys.argv[0] = str(spec.origin)
        code = loader.get_code(spec.name)
        module = _new_main(str(spec.origin), loader, spec)
    elif os.path.isdir(launch.target) or not _is_source(launch.target):
        return lambda: runpy.run_path(launch.target, run_name="__main__")
    else:
        path = os.path.abspath(launch.target)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        module = _new_main(path, loader, None)
    return lambda: exec(code, module.__dict__)


def _is_source(path: str) -> bool:
    """False for what Python runs otherwise: a zip archive, or compiled code."""
    with open(path, "rb") as file:
        return not path.endswith(".pyc") and file.read(4) != b"PK\x03\x04"


def _find_main_spec(name: str) -> importlib.machinery.ModuleSpec:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    if spec is None or spec.loader is None:
        raise ImportError(f"No module named {name}")
    return spec


_replaced_main: list[types.ModuleType] = []


def _new_main(path: str, loader: Any, spec: importlib.machinery.ModuleSpec | None) -> Any:
    module: Any = types.ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = loader
    module.__spec__ = spec
    module.__cached__ = None if spec is None else spec.cached
    module.__package__ = None if spec is None else spec.parent
    module.__builtins__ = sys.modules["builtins"]
    module.__annotations__ = {}
    _replaced_main.append(sys.modules["__main__"])  # its globals must outlive it: we run in them
    sys.modules["__main__"] = module
    return module


# ---------------------------------------------------------------- an exception nobody caught


def _report(error: BaseException) -> None:
    """Prints the traceback as Python would, and writes torchrun's error file."""
    strip_own_frames(error)
    try:
        _write_error_file(error)
    except OSError as problem:
        print(f"resilient-run: cannot write the error file: {problem}", file=sys.stderr)
    # What went before must be out before it, as at a normal end.
    sys.stdout.flush()
    sys.excepthook(type(error), error, error.__traceback__)


def strip_own_frames(error: BaseException) -> None:
    """Removes the outermost frames of the launcher from the traceback."""
    frames = error.__traceback__
    own = {__file__, runpy.__file__, "<frozen runpy>"}
    while frames is not None and (
        frames.tb_frame.f_code.co_filename in own
        or frames.tb_frame.f_code.co_filename.startswith("<frozen importlib")
    ):
        frames = frames.tb_next
    error.__traceback__ = frames


def _write_error_file(error: BaseException) -> None:
    """In the format of torch elastic's @record; a file that @record has written stays."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if not path or (os.path.exists(path) and os.path.getsize(path) > 0):
        return
    last = traceback.extract_tb(error.__traceback__)[-1:]
    extra = {
        "py_callstack": "".join(traceback.format_exception(error)),
        "timestamp": str(int(time.time())),
        "type_name": f"{type(error).__module__}.{type(error).__qualname__}",
        "frame": "".join(f"{f.filename}:{f.lineno} in {f.name}" for f in last),
    }
    message = {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}
    with open(path, "w") as file:
        json.dump({"message": message}, file)
