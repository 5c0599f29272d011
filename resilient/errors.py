"""Every error this project raises, by who must act on it.

    ResilientError                 carries .generation, .rank, .step where they are known
    ├ ConfigError(ValueError)        the user fixes the call or the command line; exit code 2
    ├ RendezvousError                the agent tries again
    │   ├ RendezvousTimeout
    │   ├ RendezvousClosed
    │   └ StaleGeneration
    ├ WorkerFailure                  the next generation repairs it
    │   ├ WorkerCrashed
    │   ├ WorkerHung
    │   └ TrainFunctionError
    ├ NodeFault                      a spare takes over
    │   ├ DeviceFault
    │   └ SilentCorruption
    ├ CheckpointError                the next tier is tried
    │   ├ CheckpointMissing
    │   └ CheckpointCorrupt
    └ Unrecoverable                  the job stops; an exit code of its own
    Interrupted(BaseException)       control flow: let it pass

Code dispatches on the class, never on the text of a message.
"""

from __future__ import annotations


class ResilientError(Exception):
    """Base of all errors of this project.

    Attributes:
        generation, rank, step: where it happened; None where that is not known.
    """

    def __init__(
        self,
        message: str = "",
        *,
        generation: int | None = None,
        rank: int | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(message)
        self.generation = generation
        self.rank = rank
        self.step = step


class ConfigError(ResilientError, ValueError):
    """The user's call, option or environment is wrong; the message says what to do."""


class RendezvousError(ResilientError):
    """Agreeing on the next generation failed; the agent may try again."""


class RendezvousTimeout(RendezvousError):
    """Not enough members arrived in time."""


class RendezvousClosed(RendezvousError):
    """The job has ended; nobody can join it."""


class StaleGeneration(RendezvousError):
    """Something of an older generation was used or received."""


class WorkerFailure(ResilientError):
    """One worker failed; the next generation goes on without it or with a replacement."""


class WorkerCrashed(WorkerFailure):
    """The process ended before the job did."""


class WorkerHung(WorkerFailure):
    """No progress for the hang timeout."""


class TrainFunctionError(WorkerFailure):
    """The user's train function raised."""


class NodeFault(ResilientError):
    """The machine, or a device in it, is at fault."""


class DeviceFault(NodeFault):
    """An accelerator failed or answers no more."""


class SilentCorruption(NodeFault):
    """Results differ that must be equal."""


class CheckpointError(ResilientError):
    """This copy of the state cannot be used; the next tier is tried."""


class CheckpointMissing(CheckpointError):
    """No copy covers what is needed."""


class CheckpointCorrupt(CheckpointError):
    """A copy is there, and is damaged."""


class Unrecoverable(ResilientError):
    """Nothing the runtime can do would be right: the job stops with the root cause."""


class Interrupted(BaseException):
    """The generation has ended; the train function is being left. Let it pass.

    A BaseException, so that ``except Exception`` in a training script does not swallow it by
    accident. One that is swallowed is raised again at the next collective or ``job`` call.
    """
