"""What ran in this kernel, kept for `%ddl export`: the source of each cell, and whether it ended well."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from IPython.core.interactiveshell import InteractiveShell

    from ddl_magics.export.cells import Cell, Notebook


@dataclass
class _Ran:
    number: int
    source: str
    id: str
    ok: bool


class Record:
    """Listens to one shell.

    Parameters
    ----------
    shell
        Whose cells; what it ran before is taken from its history, and counts as having ended well.
    strategy_of
        The session's strategy when a `%%ddl` cell ran, by the cell's number; None where it did not end well.
    """

    def __init__(self, shell: InteractiveShell, strategy_of: Callable[[int], str | None]) -> None:
        self._shell: Any = shell
        self._strategy_of = strategy_of
        self._ran = [
            _Ran(number, source, "", ok=True)
            for number, source in enumerate(shell.history_manager.input_hist_raw)  # type: ignore[union-attr]
            if number and source.strip()
        ]
        self._shell.events.register("post_run_cell", self._took_place)

    def close(self) -> None:
        """Stop listening."""
        self._shell.events.unregister("post_run_cell", self._took_place)

    def _took_place(self, result: Any) -> None:
        """As IPython calls it after each cell."""
        info = result.info
        if not info.store_history or info.silent or result.execution_count is None:
            return
        number = result.execution_count
        self._ran = [ran for ran in self._ran if ran.number != number]  # the one that loads us is in the history too
        identifier = getattr(info, "cell_id", None) or ""
        self._ran.append(_Ran(number, info.raw_cell, identifier, ok=bool(result.success)))

    def notebook(self, file: Path | None = None) -> Notebook:
        """Cells that ended well, each where it first ran and as it last ended well; or in the order of the file."""
        from ddl_magics.export.cells import Notebook, code_cell, in_order_of, read  # not when the magics are loaded

        places: dict[str, Cell] = {}
        failed: dict[str, Cell] = {}
        for ran in self._ran:
            cell = code_cell(ran.source, ran.number, "", ran.id)
            default = self._strategy_of(ran.number) if cell.kind == "ranks" else ""
            key = ran.id or ran.source.strip()
            if ran.ok and default is not None:
                places[key] = code_cell(ran.source, ran.number, default, ran.id)
                failed.pop(key, None)
            elif key not in places and cell.kind == "ranks":
                failed[key] = cell
        cells = tuple(places.values())
        path = file or self._file()
        if path is None:
            return Notebook(cells, tuple(failed.values()))
        return Notebook(in_order_of(read(path), cells), tuple(failed.values()), path)

    def _file(self) -> Path | None:
        """The notebook's file, where the front end says which; Jupyter by a variable, VS Code by a name."""
        named = os.environ.get("JPY_SESSION_NAME") or self._shell.user_ns.get("__vsc_ipynb_file__") or ""
        path = Path(named)
        return path if path.suffix == ".ipynb" and path.is_file() else None
