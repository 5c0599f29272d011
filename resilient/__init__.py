"""PyTorch training that goes on in the same processes when a rank dies, hangs or raises.

A training script imports this package and needs two names: `resilient.train`, the decorator, and
`resilient.Job`, what the decorated function is given. Both are loaded when they are first used:
importing the package does not import torch, so that tools which only read a journal start fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from resilient.errors import (
    CheckpointCorrupt,
    CheckpointError,
    CheckpointMissing,
    ConfigError,
    DeviceFault,
    Interrupted,
    NodeFault,
    RendezvousClosed,
    RendezvousError,
    RendezvousTimeout,
    ResilientError,
    SilentCorruption,
    StaleGeneration,
    TrainFunctionError,
    Unrecoverable,
    WorkerCrashed,
    WorkerFailure,
    WorkerHung,
)

if TYPE_CHECKING:
    from resilient.worker.job import Job
    from resilient.worker.train import train

__all__ = [
    "CheckpointCorrupt",
    "CheckpointError",
    "CheckpointMissing",
    "ConfigError",
    "DeviceFault",
    "Interrupted",
    "Job",
    "NodeFault",
    "RendezvousClosed",
    "RendezvousError",
    "RendezvousTimeout",
    "ResilientError",
    "SilentCorruption",
    "StaleGeneration",
    "TrainFunctionError",
    "Unrecoverable",
    "WorkerCrashed",
    "WorkerFailure",
    "WorkerHung",
    "train",
]


def __getattr__(name: str) -> Any:
    if name == "train":
        from resilient.worker.train import train

        return train
    if name == "Job":
        from resilient.worker.job import Job

        return Job
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
