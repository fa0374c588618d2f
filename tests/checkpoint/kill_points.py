"""Saves that are killed before each change that they make to the file system, and what is left then.

Started as `kill_points.py FOLDER`; writes findings.json there. Each save runs in a forked process, whose audit hook
sees every file that is opened for writing and every name that is made, changed or removed below the folder; SIGKILL
comes before the k-th of them, k from 0 until a save comes through. The first large write of each file is cut in its
middle, too.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ddl_magics.protocol import CellRequest, World
from ddl_magics.rank.checkpoint import files, layout
from ddl_magics.rank.context import Context
from tests.checkpoint.small import prepare, train

if TYPE_CHECKING:
    from collections.abc import Callable

CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def context() -> Context:
    ddl = Context(World(0, 1, 0, 1))
    ddl.begin_cell(CellRequest(code="", cell=1, run="run", name="", strategy="single"))
    return ddl


def kill_before(number: int, folder: str) -> None:
    """Kill this process before its change number `number`, from 0, to what is in `folder`."""
    seen = 0

    def count() -> None:
        nonlocal seen
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and bool(int(arguments[2] or 0) & WRITES)
        within = event in CHANGES and arguments[-1] != -1  # relative to an open folder, as `rmtree` goes through it
        if within or ((event in CHANGES or writes) and folder in str(arguments[0])):
            count()

    write, cut = files.Draft.write, set()

    def half(self: files.Draft, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) < 40 or self.path in cut:
            return write(self, view)
        cut.add(self.path)
        write(self, view[: len(view) // 2])
        count()
        return write(self, view[len(view) // 2 :])

    files.Draft.write = half  # type: ignore[method-assign]
    sys.addaudithook(hook)


def killed(number: int, folder: Path, save: Callable[[], None]) -> bool:
    """Run a save that is killed at a point; False where it came through before."""
    child = os.fork()
    if child == 0:
        kill_before(number, str(folder))
        save()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return os.WIFSIGNALED(status)


def scenario(home: Path, prepare_folder: Callable[[Path], None], save: Callable[[Path], None]) -> dict[str, Any]:
    """Kill `save` at every point, each time beginning with what `prepare_folder` makes; what is loaded after each."""
    found: dict[str, Any] = {"loaded": [], "left": [], "hidden": []}
    template = home / "template"
    prepare_folder(template)
    number, came_through = 0, False
    while not came_through:
        folder = home / str(number)
        shutil.copytree(template, folder)
        came_through = not killed(number, folder, lambda: save(folder))  # noqa: B023 - it is called here
        found["hidden"].append(sum(path.name.startswith(".") for path in folder.iterdir()))
        found["loaded"].append(whole(folder))
        ddl = context()
        model, *_ = prepare(ddl)
        saved((ddl, model), folder, "after")  # of step 0; nothing hidden may be left then
        found["left"].append([path.name for path in folder.iterdir() if path.name.startswith(".")])
        assert whole(folder) == [0, "after", True]
        shutil.rmtree(folder)
        number += 1
    return found


def whole(folder: Path) -> list[Any]:
    """Step and value of what is loaded from a folder, with its digests compared; step -1: there is none."""
    ddl = context()
    model, *_ = prepare(ddl)
    loaded = ddl.load(folder, model, resume="latest")
    if loaded.folder is None:
        return [-1, "none", True]
    assert (loaded.folder / layout.RECORD).is_file()
    return [loaded.step, loaded.extra["name"], loaded.extra["sum"] == total(model)]


def total(model: Any) -> float:
    return sum(float(value.double().sum()) for value in model.state_dict().values())


def trained(epochs: int) -> tuple[Any, Any]:
    ddl = context()
    model, _, _, loader = prepare(ddl)
    train(ddl, model, loader, epochs=epochs)
    return ddl, model


def saved(made: tuple[Any, Any], folder: Path, name: str, **options: Any) -> None:
    ddl, model = made
    ddl.save(folder, model, name=name, sum=total(model), **options)


def without_exchange(save: Callable[[Path], None]) -> Callable[[Path], None]:
    """As on a file system that cannot let two folders change places."""

    def call(folder: Path) -> None:
        files.exchange = lambda *_: False  # type: ignore[assignment]
        save(folder)

    return call


def main(home: Path) -> None:
    torch.set_num_threads(1)
    old, new, other = trained(1), trained(2), trained(1)
    again = lambda folder: saved(other, folder, "new")  # noqa: E731
    findings = {
        "first": scenario(home / "a", lambda folder: folder.mkdir(parents=True), lambda f: saved(new, f, "new")),
        "next": scenario(home / "b", lambda f: saved(old, f, "old"), lambda f: saved(new, f, "new", keep=1)),
        "same step": scenario(home / "c", lambda f: saved(old, f, "old"), again),
        "same step, no exchange": scenario(home / "d", lambda f: saved(old, f, "old"), without_exchange(again)),
    }
    (home / "findings.json").write_text(json.dumps(findings))


main(Path(sys.argv[1]))
