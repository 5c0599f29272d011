"""What may be imported from where, beyond what import-linter's contracts say in pyproject.toml."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FORBIDDEN_IN_CORE = {
    "asyncio",
    "datetime",
    "logging",
    "multiprocessing",
    "numpy",
    "os",
    "random",
    "secrets",
    "selectors",
    "signal",
    "socket",
    "subprocess",
    "threading",
    "time",
    "torch",
    "uuid",
}


def imported_modules(path: Path) -> set[str]:
    """The full names of all modules that a file imports anywhere, functions included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def sources(*parts: str) -> list[Path]:
    found = sorted(ROOT.joinpath(*parts).rglob("*.py"))
    assert found, f"no sources in {'/'.join(parts)}"
    return found


@pytest.mark.parametrize("path", sources("resilient", "core"), ids=lambda path: path.stem)
def test_core_is_pure(path: Path) -> None:
    top = {name.split(".")[0] for name in imported_modules(path)}
    assert not top & FORBIDDEN_IN_CORE
    ours = {name for name in imported_modules(path) if name.split(".")[0] == "resilient"}
    strangers = {n for n in ours if not n.startswith(("resilient.core", "resilient.errors"))}
    assert not strangers


def test_resilient_never_imports_its_launcher() -> None:
    for path in sources("resilient"):
        guilty = {n for n in imported_modules(path) if n.split(".")[0] == "resilient_run"}
        assert not guilty, path


def modules_loaded_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'launcher'}", "PATH": "/usr/bin:/bin"},
    )
    return set(done.stdout.split())


@pytest.mark.parametrize("module", ["resilient", "resilient.core.coordinator", "resilient.report"])
def test_import_is_light(module: str) -> None:
    loaded = modules_loaded_by(f"import {module}")
    assert module in loaded
    assert "torch" not in loaded
    assert "numpy" not in loaded


def test_public_names() -> None:
    loaded = modules_loaded_by(
        "import resilient\n"
        "assert callable(resilient.train)\n"
        "assert isinstance(resilient.Job, type)\n"
        "assert issubclass(resilient.ConfigError, ValueError)\n"
        "assert not issubclass(resilient.Interrupted, Exception)\n"
        "assert {'train', 'Job', 'Interrupted'} <= set(resilient.__all__)"
    )
    assert "torch" in loaded


def test_unknown_name_is_an_attribute_error() -> None:
    import resilient

    with pytest.raises(AttributeError, match="no_such_name"):
        resilient.no_such_name  # noqa: B018
