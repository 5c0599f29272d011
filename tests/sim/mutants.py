"""A core that is broken on purpose: what looks for broken promises must find this one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from resilient.core import transitions
from resilient.core.model import Cut


def resume_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each generation resumes one step before the newest that is held."""
    newest_cut = transitions.newest_cut

    def older_cut(*arguments: Any, **keywords: Any) -> Cut | None:
        cut = newest_cut(*arguments, **keywords)
        return cut and replace(cut, step=max(0, cut.step - 1))

    monkeypatch.setattr(transitions, "newest_cut", older_cut)
