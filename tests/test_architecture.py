"""The import layers of the package, read from its source."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import clipctl

PACKAGE = Path(clipctl.__file__).parent

# A part may import from rows above its own, and from itself; parts on one row never import each other.
LAYERS = [
    {"errors", "progress"},
    {"files"},
    {"config"},
    {"runs", "hardware"},
    {"data", "model"},
    {"interop"},
    {"training"},
    {"bench", "monitor", "doctor", "inference"},
    {"report"},
    {"cli"},
]
TORCH_FREE = [
    "errors",
    "config.layers",
    "runs.rundir",
    "runs.metrics",
    "runs.checkpoint",
    "runs.store",
    "monitor.watch",
    "monitor.runs",
    "hardware.profile",
    "model.cost",
    "model.forecast",
    "model.ranking",
    "runs.inventory",
    "bench.recommend",
    "bench.results",
    "bench.crossover",
    "cli.app",
]


MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}


def imported_modules(path: Path) -> set[str]:
    """The modules of clipctl that a file imports anywhere, in functions and for type checking too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name in MODULES and MODULES[name].name != "__init__.py"}


def imported_parts(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imported_modules(path)}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path):
    own = path.relative_to(PACKAGE).with_suffix("").parts[0]
    if own in ("__init__", "__main__"):
        return
    row = next(number for number, names in enumerate(LAYERS) if own in names)
    allowed = set().union(*LAYERS[:row]) | {own}
    assert imported_parts(path) <= allowed


def test_no_modules_import_each_other_in_a_circle():
    waiting = {name: imported_modules(path) - {name} for name, path in MODULES.items()}
    while free := [name for name, imports in waiting.items() if not imports & waiting.keys()]:
        waiting = {name: imports for name, imports in waiting.items() if name not in free}
    assert not waiting


def test_torch_free_modules_start_without_torch():
    imports = "; ".join(f"import clipctl.{name}" for name in TORCH_FREE)
    code = f"import sys; {imports}; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_only_the_package_itself_has_a_filled_init():
    filled = [path for path in PACKAGE.rglob("__init__.py") if path.read_text().strip()]
    assert filled == [PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", sorted((PACKAGE.parent / "benchmarks").glob("*.py")), ids=lambda path: path.name)
def test_what_benchmarks_import_exists(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("clipctl"):
            module = importlib.import_module(node.module)
            names = [alias.name for alias in node.names]
            assert all(hasattr(module, name) or f"{node.module}.{name}" in MODULES for name in names), (
                node.module,
                names,
            )
