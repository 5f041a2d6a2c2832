"""What is installed: one package made of six folders, whose imports go one way."""

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGE_DIRS: dict[str, str] = PROJECT["tool"]["setuptools"]["package-dir"]

# These packages need their engine when they are imported; all else only when it is used.
NEED_AN_EXTRA = ("tierstore.adapters.transformers", "tierstore.kernels.triton")
EXTRAS = (
    "transformers", "gguf", "cupy", "kvikio", "redis", "triton", "matplotlib", "libcachesim",
    "prometheus_client", "diskcache", "rocksdict",
)  # fmt: skip

IMPORT_WITHOUT_EXTRAS = """
import importlib, sys
for extra in {extras!r}:
    sys.modules[extra] = None
for module in {modules!r}:
    importlib.import_module(module)
"""


def modules_of_checkout() -> dict[str, Path]:
    """Dotted name of every module of the package, to its file in the checkout."""
    modules = {}
    for package, folder in PACKAGE_DIRS.items():
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            modules[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return modules


def run(
    *command: str, cwd: Path, pythonpath: Path | None = None
) -> subprocess.CompletedProcess[str]:
    env = os.environ | ({"PYTHONPATH": str(pythonpath)} if pythonpath else {})
    return subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False
    )


def tool(name: str) -> str:
    return str(Path(sys.executable).parent / name)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built from a copy so that no earlier build leaks into it."""
    source = tmp_path_factory.mktemp("source")
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in PACKAGE_DIRS.values():
        shutil.copytree(ROOT / folder, source / folder, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", "dist")
    built = run(sys.executable, "-m", "pip", "wheel", *options, ".", cwd=source)
    assert built.returncode == 0, built.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture
def installed(wheel: Path, tmp_path: Path) -> Path:
    """A fresh folder that holds what the wheel installs; a test may plant faults in it."""
    target = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def lint_imports(installed: Path) -> subprocess.CompletedProcess[str]:
    config = str(ROOT / "pyproject.toml")
    return run(tool("lint-imports"), "--no-logo", "--no-cache", config, cwd=installed)


def test_wheel_holds_every_module_and_the_typing_marker(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if name.startswith("tierstore/")}
    expected = {"tierstore/py.typed", "tierstore/kernels/cuda/gather.cu"}
    for name, path in modules_of_checkout().items():
        file = name.replace(".", "/")
        expected.add(f"{file}/__init__.py" if path.name == "__init__.py" else f"{file}.py")
    assert packed == expected


def test_mapped_folders_resolve_from_the_checkout_and_from_elsewhere(tmp_path: Path) -> None:
    names = ", ".join(PACKAGE_DIRS)
    program = f"import {names}"
    for cwd in (ROOT, tmp_path):
        answer = run(sys.executable, "-c", program, cwd=cwd)
        assert answer.returncode == 0, f"from {cwd}: {answer.stderr}"


def test_imports_without_any_extra(installed: Path) -> None:
    modules = sorted(m for m in modules_of_checkout() if not m.startswith(NEED_AN_EXTRA))
    program = IMPORT_WITHOUT_EXTRAS.format(extras=EXTRAS, modules=modules)
    answer = run(sys.executable, "-P", "-c", program, cwd=installed, pythonpath=installed)
    assert answer.returncode == 0, answer.stderr


def test_imports_go_one_way(installed: Path) -> None:
    answer = lint_imports(installed)
    assert answer.returncode == 0, answer.stdout + answer.stderr


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("kernels", "planted"),
        ("kernels", "policies"),
        ("", "policies"),
        ("", "indexers"),
        ("", "adapters"),
        ("testing", "policies"),
        ("policies", "indexers"),
        ("indexers", "adapters"),
        ("adapters", "benchmarks"),
    ],
)
def test_an_import_against_the_layers_is_found(
    installed: Path, importer: str, imported: str
) -> None:
    package = installed / "tierstore"
    (package / "planted.py").touch()
    (package / importer / "upward.py").write_text(f"import tierstore.{imported}\n")
    answer = lint_imports(installed)
    assert answer.returncode == 1, answer.stdout + answer.stderr
    assert "upward -> " in answer.stdout.replace("\n", " ")


def test_type_errors_in_mapped_folders_are_found(installed: Path) -> None:
    """Only the planted modules are left, since checking the real ones takes a minute."""
    for module in installed.rglob("*.py"):
        module.write_text("")
    for package in PACKAGE_DIRS:
        (installed / package.replace(".", "/") / "planted.py").write_text("x: int = ''\n")
    config = str(ROOT / "pyproject.toml")
    options = ("--config-file", config, "--cache-dir", os.devnull, "-p", "tierstore")
    answer = run(tool("mypy"), *options, cwd=installed)
    assert f"Found {len(PACKAGE_DIRS)} errors" in answer.stdout


def test_commands_are_contributed_by_entry_points(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (file,) = (name for name in archive.namelist() if name.endswith("/entry_points.txt"))
        entry_points = archive.read(file).decode()
    assert "tierstore = tierstore.adapters.cli:main" in entry_points
    assert "bench = tierstore.benchmarks.cli:add_command" in entry_points
