"""Who may import whom, what stays out of the notebook's kernel, and what no file may hold.

The arrows are read from the source by `ast`. An import under `if TYPE_CHECKING:` does not run and is not an arrow.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ddl_magics"

FOR_ALL = {"protocol", "errors", "strategies.spec"}
"""What every part may use; these use nothing of ours but one another."""

ARROWS = {
    "__init__": {"magics", "compatibility", "rank"},  # `%load_ext` in a notebook, `init` in a script under torchrun
    "magics": {"parsing", "completion", "export", "session", "cluster", "views"},
    "cli": {"parsing", "cluster", "export", "views", "telemetry"},
    "parsing": set(),
    "compatibility": set(),
    "comparison": {"views"},
    "completion": {"words", "session"},
    "words": {"parsing"},
    "foresight": {"views"},
    "session": {
        "parsing",
        "foresight",
        "chat",
        "comparison",
        "debugging",
        "postmortem",
        "cells",
        "running",
        "verdict",
        "cluster",
        "views",
        "telemetry",
    },
    "deaths": {"cluster", "views"},
    "cells": {
        "deaths",
        "debugging",
        "health",
        "parsing",
        "running",
        "ladder",
        "verdict",
        "cluster",
        "views",
        "telemetry",
    },
    "chat": {"cells", "parsing", "views"},
    "ladder": {"debugging", "freeing", "running", "views"},
    "freeing": {"running", "waits", "views"},
    "health": {"cluster", "deaths", "ladder", "waits", "views"},
    "debugging": {"prompt", "running", "views"},
    "postmortem": {"prompt", "cluster", "views"},
    "prompt": {"views"},
    "running": {"cluster", "views", "telemetry"},
    "verdict": {"ladder", "running", "views"},
    "export": {"parsing", "foresight"},  # a notebook as a script; magics in a cell are read as foresight reads them
    "cluster": {"lease"},
    "lease": set(),  # who owns a process, judged in the same way on both sides
    "telemetry": set(),
    "waits": set(),  # who waits for whom: pure, of what the ranks say
    "views": {"telemetry", "waits"},
    "rank": {"strategies", "lease"},
    "strategies": set(),
    "instructions": set(),  # rows of tokens for fine-tuning: a user's cell imports it
    "protocol": set(),
    "errors": set(),
    "strategies.spec": set(),
}
"""Part -> parts of ours that it may import, beside itself and FOR_ALL: only ever what lies below it.

`session`, `cells`, `ladder`, `running` and `verdict` are one layer, the cluster as the notebook sees it.
"""

NOTEBOOK_SIDE = set(ARROWS) - {"rank", "strategies", "instructions"}
HEAVY = {"torch", "deepspeed", "axonn", "transformers", "accelerate"}

PRIVATE = {
    "_children",
    "_control_stream",
    "_dispatch_iopub",
    "_mux_socket",
    "_output_futures",
    "_registration_callbacks",
    "_send_control_request",
    "control_handlers",
    "control_msg_types",
    "create_message_futures",
    "iopub_callbacks",
}
"""ipyparallel's private interface, as far as it is used."""
PRIVATE_HOMES = {PACKAGE / "cluster" / "ipp.py", PACKAGE / "rank" / "engine.py"}

HOSTS = [
    ".".join(parts)
    for parts in [
        ("pypi", "org"),
        ("pythonhosted", "org"),
        ("registry", "npmjs", "org"),
        ("deb", "debian", "org"),
        ("download", "pytorch", "org"),
        ("conda", "anaconda", "org"),
        ("repo", "anaconda", "com"),
    ]
]
"""Where packages come from is the site's business: no file names a registry's host."""


def modules() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def part_of(path: Path) -> str:
    """`rank` for ddl_magics/rank/cell.py, `session` for ddl_magics/session.py."""
    relative = path.relative_to(PACKAGE).with_suffix("")
    return "strategies.spec" if relative.as_posix() == "strategies/spec" else relative.parts[0]


def running_imports(tree: ast.AST) -> list[ast.Import | ast.ImportFrom]:
    """Every import statement that can run, inside functions too."""
    found: list[ast.Import | ast.ImportFrom] = []
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting.extend(node.orelse)
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def names_imported(path: Path) -> set[str]:
    """Dotted names, `from a import b` as `a.b`, relative ones made absolute."""
    names: set[str] = set()
    package = ["ddl_magics", *path.relative_to(PACKAGE).parent.parts]
    for node in running_imports(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def ours(name: str) -> str | None:
    """The part that an imported dotted name belongs to; None when it is not ours."""
    head, *rest = name.split(".")
    if head != "ddl_magics":
        return None
    if rest[:2] == ["strategies", "spec"]:
        return "strategies.spec"
    known = rest and (rest[0] in ARROWS)
    return rest[0] if known else "__init__"


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_imports_follow_the_arrows(path: Path) -> None:
    part = part_of(path)
    assert part in ARROWS, f"{path.name} is a new part: give it its arrows here and in docs/architecture.md"
    allowed = ARROWS[part] | FOR_ALL | {part}
    wrong = {name for name in names_imported(path) if (to := ours(name)) is not None and to not in allowed}
    assert not wrong, f"{part} may import {sorted(allowed)}, and not {sorted(wrong)}"


@pytest.mark.parametrize("path", [p for p in modules() if part_of(p) in NOTEBOOK_SIDE], ids=lambda p: p.name)
def test_notebook_side_never_imports_a_heavy_library(path: Path) -> None:
    assert not {name for name in names_imported(path) if name.split(".")[0] in HEAVY}


def test_ipyparallels_private_interface_stands_in_two_modules() -> None:
    strays = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in modules()
        if path not in PRIVATE_HOMES
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr in PRIVATE)
        or (isinstance(node, ast.Constant) and node.value in PRIVATE)
    ]
    assert not strays


@pytest.mark.parametrize("path", modules(), ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_every_module_says_what_it_is_for(path: Path) -> None:
    tree = ast.parse(path.read_text())
    assert not tree.body or ast.get_docstring(tree), "a module begins with what it is for and where its limits are"


def test_no_file_names_a_registry_host() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = [
        f"{name}: {host}"
        for name in listed.stdout.splitlines()
        if (ROOT / name).is_file()
        for host in HOSTS
        if host.encode() in (ROOT / name).read_bytes()
    ]
    assert not found


PRINT_WHAT_IS_LOADED = """
import sys
from ddl_magics.strategies import spec
for name in spec.names():
    spec.strategy_class(name)
print(*sys.modules)
"""


@pytest.mark.timeout(60)
def test_checking_a_strategy_imports_no_heavy_library() -> None:
    assert not HEAVY & loaded_by(PRINT_WHAT_IS_LOADED)


LOAD_EXTENSION = """
import sys, time
import ipyparallel
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
began = time.process_time()  # imports compute; how long others hold the processor is not theirs
shell.run_line_magic("load_ext", "ddl_magics")
took = time.process_time() - began
assert "ddl" in shell.magics_manager.magics["cell"]
print(took, file=sys.stderr)
print(*sys.modules)
"""


@pytest.mark.timeout(60)
def test_the_extension_loads_without_a_heavy_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    assert not HEAVY & loaded_by(LOAD_EXTENSION)


@pytest.mark.timeout(120)
def test_the_extension_loads_within_half_a_second_of_ipyparallel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    seconds = []
    for _ in range(5):
        seconds.append(float(run(LOAD_EXTENSION).stderr.split()[-1]))
        if seconds[-1] < 0.5:
            break
    assert min(seconds) < 0.5, f"seconds of each try: {seconds}"


def loaded_by(program: str) -> set[str]:
    """Top-level names in sys.modules at the end of a program that prints them."""
    return {name.split(".")[0] for name in run(program).stdout.split()}


def run(program: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done
