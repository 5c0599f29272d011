"""Makes the DeviceMeshes of a generation that has ended unusable.

Group names start again at "0" in each generation, so torch takes an old mesh without a word and
binds it to the *new* world; with ranks permuted, full_tensor() then returns its rows in a wrong
order. So every mesh is remembered (weakly) when it is made, and turned into a `StaleMesh` when its
generation is left. That also drops its references to the old process groups.
"""

from __future__ import annotations

import weakref
from typing import Any, NoReturn

from torch.distributed.device_mesh import DeviceMesh

from resilient.errors import StaleGeneration

# Not a WeakSet: meshes compare equal by their content, and each object has to be found.
_living: list[weakref.ref[DeviceMesh]] = []
_watching = False

_QUIET = frozenset({"__class__", "__dict__", "__reduce_ex__", "__weakref__"})


class StaleMesh(DeviceMesh):
    """What a mesh becomes when its generation ends: any use raises StaleGeneration.

    Comparing and hashing stay allowed, by identity: torch's caches hold old meshes as keys, and a
    look-up for a new mesh must find them different, not fail.
    """

    def __getattribute__(self, name: str) -> Any:
        if name in _QUIET:
            return object.__getattribute__(self, name)
        _refuse()

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return "<DeviceMesh of a generation that has ended>"

    def __enter__(self) -> NoReturn:
        _refuse()

    def __getitem__(self, mesh_dim_names: Any) -> NoReturn:
        _refuse()


def watch_meshes() -> None:
    """From now on remembers every DeviceMesh made in this process."""
    global _watching
    if _watching:
        return
    _watching = True
    make = DeviceMesh.__init__

    def make_and_remember(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        _living.append(weakref.ref(self))
        make(self, *args, **kwargs)

    DeviceMesh.__init__ = make_and_remember  # type: ignore[method-assign]


def poison_meshes() -> int:
    """Turns every mesh made since the last call into a StaleMesh; returns how many."""
    num_poisoned = 0
    while _living:
        mesh = _living.pop()()
        if mesh is not None:
            mesh.__dict__.clear()
            mesh.__class__ = StaleMesh
            num_poisoned += 1
    return num_poisoned


def _refuse() -> NoReturn:
    raise StaleGeneration(
        "this DeviceMesh belongs to a generation that has ended: make it anew in the train "
        "function, or use job.mesh"
    )
