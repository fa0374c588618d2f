"""Where pictures and text go: a notebook cell, a terminal, or a notebook that nobody watches.

A screen is made once for each cell, on the main thread, while that cell runs. What is sent later, from any thread,
lands under that cell.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from typing import TextIO

    from rich.console import Console
    from rich.live import Live

Bundle = dict[str, Any]
"""A picture in several formats, by MIME type; `text/plain` is always among them."""
Kind = Literal["notebook", "terminal", "headless"]
"""`headless`: a notebook run by nbclient or papermill, or output that goes to a file. Nothing is redrawn there."""


class Screen(Protocol):
    """What the views need of the outside world."""

    kind: Kind

    def display(self, data: Bundle, display_id: str | None = None, *, update: bool = False) -> None:
        """Show a picture; with `update`, in place of the one shown under that `display_id` before."""

    def write(self, name: str, text: str) -> None:
        """Show text of `stdout` or `stderr`, as it is."""


class NotebookScreen:
    """The output of one notebook cell.

    Messages carry the header of the cell's own request, taken now, because what ipykernel takes for the current
    request on a background thread is whatever came last. Works with ipykernel 6.29 to 7.4.

    Parameters
    ----------
    kernel
        The running `ipykernel.kernelbase.Kernel`.
    """

    kind: Kind

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._parent = kernel.get_parent("shell")
        # nbclient and papermill say so in the request itself: nobody is there to answer.
        self.kind = "notebook" if self._parent.get("content", {}).get("allow_stdin", True) else "headless"

    def display(self, data: Bundle, display_id: str | None = None, *, update: bool = False) -> None:
        content: dict[str, Any] = {"data": data, "metadata": {}}
        if display_id is not None:
            content["transient"] = {"display_id": display_id}
        self._send("update_display_data" if update else "display_data", content)

    def write(self, name: str, text: str) -> None:
        self._send("stream", {"name": name, "text": text})

    def _send(self, kind: str, content: dict[str, Any]) -> None:
        kernel = self._kernel
        kernel.session.send(kernel.iopub_socket, kind, content, parent=self._parent, ident=kind.encode())


class TerminalScreen:
    """Standard output of this process: IPython in a terminal, or the command-line program.

    While a live panel is up (`live`), text appears above it and a line that is still being redrawn under it.
    """

    kind: Kind

    def __init__(self, stdout: TextIO | None = None, stderr: TextIO | None = None) -> None:
        self._stdout = stdout or sys.stdout
        self._stderr = stderr or sys.stderr
        self.kind = "terminal" if self._stdout.isatty() else "headless"
        self.live: Live | None = None
        self.row = ""
        """The unfinished line under the live panel."""

    def console(self) -> Console:
        """A rich console over the same output."""
        from rich.console import Console

        return Console(file=self._stdout)

    def display(self, data: Bundle, display_id: str | None = None, *, update: bool = False) -> None:
        self.write("stdout", str(data.get("text/plain", "")).rstrip("\n") + "\n")

    def write(self, name: str, text: str) -> None:
        if self.live is not None:
            self._above(self.live, text)
            return
        stream = self._stderr if name == "stderr" else self._stdout
        stream.write(text)
        stream.flush()

    def put_live_aside(self) -> None:
        """Take the live panel off the terminal, so that a prompt can be there; the next picture brings it back."""
        live, self.live = self.live, None
        if live is None:
            return
        live.stop()
        row, self.row = self.row, ""
        self.write("stdout", f"{row}\n" if row else "")

    def _above(self, live: Live, text: str) -> None:
        from rich.text import Text

        *lines, row = (self.row + text).split("\n")
        for line in lines:
            live.console.print(Text.from_ansi(_overwritten(line)), soft_wrap=True)
        self.row = _overwritten(row)


def _overwritten(line: str) -> str:
    """What a line shows after its carriage returns: the text behind the last one that has any."""
    return next((part for part in reversed(line.split("\r")) if part), "")


def current_screen(shell: Any = None) -> Screen:
    """The screen of the cell that runs now. `shell`: the IPython shell, None outside IPython."""
    kernel = getattr(shell, "kernel", None)
    if kernel is None or not hasattr(sys.stdout, "pub_thread"):
        # No kernel, or `%%capture` holds the output: what is captured is text.
        return TerminalScreen()
    sys.stdout.flush()
    sys.stderr.flush()
    return NotebookScreen(kernel)
