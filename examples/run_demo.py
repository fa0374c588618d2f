"""Run the quickstart notebook without a browser, show what its cells print while they run, and render it as HTML.

`make demo` calls this. Ends with status 1 and the notebook's error when a cell fails.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbconvert import HTMLExporter

HERE = Path(__file__).parent
NOTEBOOK = HERE / "00_quickstart.ipynb"
BUILD = HERE.parent / "build"
CELL_S = 600
"""Seconds that one cell may take."""
ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Demo(NotebookClient):
    """Executes a notebook and shows its output as it comes."""

    def process_message(self, msg, cell, cell_index):
        kind, content = msg["msg_type"], msg["content"]
        if kind == "stream":
            print(as_lines(content["text"]), end="", flush=True)
        elif kind in {"display_data", "execute_result"} and "text/plain" in content["data"]:
            print(content["data"]["text/plain"], flush=True)
        return super().process_message(msg, cell, cell_index)


def as_lines(text: str) -> str:
    """Progress that a notebook redraws in place, by carriage returns, as lines; no colour where nobody sees it."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return lines if sys.stdout.isatty() else ANSI.sub("", lines)


def announce(cell, cell_index: int) -> None:
    """Say which cell begins, by its first line."""
    if cell.cell_type == "code":
        print(f"\n[{cell_index}] {cell.source.splitlines()[0]}", flush=True)


def main() -> int:
    """Execute, render, and say where the picture is."""
    began = time.monotonic()
    print(f"demo: running {NOTEBOOK.relative_to(HERE.parent)}; about 2 minutes on 2 cores", flush=True)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    demo = Demo(
        notebook,
        timeout=CELL_S,
        resources={"metadata": {"path": str(HERE)}},
        on_cell_start=announce,
        extra_arguments=["--log-level=ERROR"],  # a kernel on this machine warns that it does not encrypt
    )
    status = 0
    try:
        demo.execute()
    except CellExecutionError as error:
        print(ANSI.sub("", str(error)), file=sys.stderr)
        status = 1
    BUILD.mkdir(exist_ok=True)
    nbformat.write(notebook, BUILD / NOTEBOOK.name)
    html, _ = HTMLExporter().from_notebook_node(notebook)
    rendered = (BUILD / NOTEBOOK.name).with_suffix(".html")
    rendered.write_text(html, encoding="utf-8")
    print(f"\ndemo: {'done' if status == 0 else 'failed'} in {time.monotonic() - began:.0f} s")
    print(f"demo: the notebook as it ran: {rendered}")
    return status


if __name__ == "__main__":
    sys.exit(main())
