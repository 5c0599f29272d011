"""What the command line and the environment have asked for, checked: what the agent needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from resilient.core.detector import Limits
from resilient.core.model import Config
from resilient_run.logs import LogOptions
from resilient_run.zygote import Launch


@dataclass(frozen=True)
class Options:
    """One job on one node.

    Attributes:
        host: what workers connect to for the store (MASTER_ADDR).
        master_port: of the first store, 0 for any.
        detect_hangs: False: --hang-timeout off.
        drills: --inject faults, as given.
        checkpoint_every: steps, 0: only when the job has to stop.
        signals_to_handle: torchrun's option as given.
        signals: their numbers.
    """

    launch: Launch
    config: Config
    num_slots: int
    logs: LogOptions
    limits: Limits
    run_id: str
    argv: tuple[str, ...] = ()
    role: str = "default"
    node: str = "localhost"
    host: str = "127.0.0.1"
    master_port: int = 0
    detect_hangs: bool = True
    drills: tuple[str, ...] = ()
    checkpoint_dir: str = ""
    checkpoint_every: int = 0
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    signals: tuple[int, ...] = field(default=(15, 2, 1, 3))
    virtual_local_rank: bool = False
