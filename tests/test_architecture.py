"""The import layers of the package, read from its source."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import clipctl

PACKAGE = Path(clipctl.__file__).parent

# A module may import from rows above its own, and from its own folder; names on one row never import each other.
LAYERS = [
    {"errors", "files"},
    {"config"},
    {"runs", "hardware"},
    {"data", "model"},
    {"training"},
    {"bench", "monitor", "inference", "interop"},
    {"cli"},
]
TORCH_FREE = [
    "errors",
    "config",
    "runs.rundir",
    "runs.metrics",
    "runs.checkpoints",
    "runs.store",
    "monitor.watch",
    "hardware.profile",
    "model.cost",
    "model.forecast",
    "bench.results",
    "bench.crossover",
    "cli.app",
]


def imported_parts(path: Path) -> set[str]:
    """The first-level parts of clipctl that a file imports, type-checking imports included."""
    parts = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "clipctl":
            names = node.module.split(".")[1:] or [alias.name for alias in node.names]
            parts.add(names[0])
        elif isinstance(node, ast.Import):
            parts |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("clipctl.")}
    return parts - {"__version__"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own in ("__init__", "__main__"):
        return
    row = next(number for number, names in enumerate(LAYERS) if own in names)
    allowed = set().union(*LAYERS[:row]) | {own}
    assert imported_parts(path) <= allowed


def test_torch_free_modules_start_without_torch():
    imports = "; ".join(f"import clipctl.{name}" for name in TORCH_FREE)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_only_the_package_itself_has_a_filled_init():
    filled = [path for path in PACKAGE.rglob("__init__.py") if path.read_text().strip()]
    assert filled == [PACKAGE / "__init__.py"]
