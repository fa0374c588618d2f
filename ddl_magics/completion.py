"""Tab completion and help in a `%%ddl` cell, from rank 0's namespace; and of the words of our magics themselves.

Where rank 0 cannot answer at once (it runs a cell, is gone, or there are no ranks) there are no completions and there
is no help: the kernel's own names would be the wrong ones. All other cells go to IPython as before. Hooks are
IPython's `Completer.completions`, which ipykernel and the terminal both call with the whole cell, and ipykernel's
`do_inspect`; a matcher of `Completer.custom_matchers` could only add to the kernel's names, not stand in for them.
Limits: front ends of the old kind, that send one line instead of the cell, get the kernel's completions.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import ipyparallel as ipp
from IPython.core.completer import Completion

from ddl_magics.errors import DDLError
from ddl_magics.words import Words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from concurrent.futures import Future

    from IPython.core.interactiveshell import InteractiveShell

    from ddl_magics.session import Session

ANSWER_S = 0.25
"""Seconds that rank 0 has to answer."""

CELL = re.compile(r"\s*%%ddl(?!\S)[^\n]*\n")
"""The first line of a cell that runs on the ranks."""


class FirstRank:
    """Rank 0, as far as it has time."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._question: Future[Any] | None = None

    def ask(self, function: str, *args: Any) -> Any:
        """What a function of `rank.completion` gives; None where the rank is busy, gone, fails or is late.

        Runs in the rank's main thread, between cells. One question at a time waits there.
        """
        if self._question is not None and not self._question.done():
            return None
        try:
            cells = self._session.cells
            cells.check_ready()
            self._question = cells.cluster.client.call(f"ddl_magics.rank.completion:{function}", {0: args})[0]
            return cells.cluster.wait({0: self._question}, ANSWER_S)[0]
        except (DDLError, TimeoutError, ipp.error.IPythonError):
            return None


class CellCompletion:
    """Stands before the completer and the inspector of one shell, between `install` and `remove`."""

    def __init__(self, shell: InteractiveShell, session: Session, verbs: Iterable[str]) -> None:
        self._shell: Any = shell
        self._completer: Any = shell.Completer
        self._kernel: Any = getattr(shell, "kernel", None)
        self._session = session
        self._rank = FirstRank(session)
        self._active = False
        self._before: dict[str, Any] = {}
        ours = {"push": self._of_kernel, "pull": self._of_namespace, "check": self._of_namespace, "show": self._of_runs}
        self._words = Words(verbs, ours)

    def install(self) -> None:
        """Begin."""
        self._active = True
        for owner, name in self._places():
            self._before[name] = getattr(owner, name)
            setattr(owner, name, getattr(self, name))

    def remove(self) -> None:
        """Leave both as they were; where somebody else came after us, only step aside."""
        self._active = False
        for owner, name in self._places():
            if vars(owner).get(name) == getattr(self, name):
                delattr(owner, name)  # what was there before us is the class's own method, or else is put back
                if getattr(owner, name) != self._before[name]:
                    setattr(owner, name, self._before[name])

    def _places(self) -> list[tuple[Any, str]]:
        kernel = [(self._kernel, "do_inspect")] if self._kernel is not None else []
        return [(self._completer, "completions"), *kernel]

    def completions(self, text: str, offset: int) -> Iterator[Completion]:
        """As `IPCompleter.completions`."""
        if self._active and in_cell(text, offset):
            return iter(self._of_rank(text, offset))
        found = self._words.complete(text[:offset].rpartition("\n")[2]) if self._active else None
        if found is None:
            return self._before["completions"](text, offset)  # type: ignore[no-any-return]
        length, texts = found
        return (Completion(offset - length, offset, one, type="keyword") for one in texts)

    def _of_rank(self, code: str, cursor: int) -> list[Completion]:
        found = self._rank.ask("complete", code, cursor)
        return [Completion(start, end, text, type=kind, signature=signature)
                for start, end, text, kind, signature in found or ()]  # fmt: skip

    def do_inspect(self, code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        """As ipykernel's `do_inspect`."""
        if not self._active or not in_cell(code, cursor_pos):
            return self._before["do_inspect"](code, cursor_pos, detail_level, omit_sections)
        data = self._rank.ask("inspect", code, cursor_pos, detail_level) or {}
        if not self._shell.enable_html_pager:
            data.pop("text/html", None)
        return {"status": "ok", "found": bool(data), "data": data, "metadata": {}}

    # Names behind verbs.

    def _of_kernel(self, typed: str) -> list[str]:
        hidden = self._shell.user_ns_hidden
        return [name for name in self._shell.user_ns if name not in hidden and not name.startswith("_")]

    def _of_namespace(self, typed: str) -> list[str]:
        """Names and attributes of rank 0, with what was typed before the last dot."""
        head = "%%ddl\n"
        found = self._of_rank(head + typed, len(head + typed))
        return [typed[: one.start - len(head)] + one.text for one in found if not one.text.startswith("%")]

    def _of_runs(self, typed: str) -> list[str]:
        return [history.info.name for history in self._session.runs.histories()]


def in_cell(code: str, cursor: int) -> bool:
    """Whether the cursor is in code that runs on the ranks."""
    line = CELL.match(code)
    return line is not None and cursor >= line.end()
