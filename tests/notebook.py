"""A real Jupyter kernel, driven as a front end does, for tests that promise what a notebook shows."""

from __future__ import annotations

import os
import queue
import re
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import psutil
import zmq
from jupyter_client.manager import KernelManager

if TYPE_CHECKING:
    from pathlib import Path

ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass
class Shown:
    """What a cell showed."""

    stdout: str = ""
    stderr: str = ""
    displays: list[dict] = field(default_factory=list)
    """Data of display_data and execute_result messages, updates by display id already made."""
    updates: int = 0
    messages: int = 0
    bytes: int = 0
    number: int = 0
    """Of the cell, as the front end shows it."""
    ename: str | None = None
    evalue: str = ""
    traceback: str = ""
    seconds: float = 0.0

    @property
    def text(self) -> str:
        """Everything that is text, as a reader sees it."""
        plain = "\n".join(str(data.get("text/plain", "")) for data in self.displays)
        return ANSI.sub("", f"{self.stdout}\n{self.stderr}\n{plain}\n{self.traceback}")


class Notebook:
    """One kernel with ddl_magics loaded."""

    def __init__(self, cwd: Path | None = None, env: dict[str, str] | None = None, *, load: bool = True) -> None:
        self.manager = KernelManager(kernel_name="python3", context=zmq.Context())
        # The kernel of this very environment, whatever kernelspecs the machine has.
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        # With that variable ipykernel does not read file descriptors 1 and 2, as it does for a user.
        self.manager.start_kernel(
            cwd=str(cwd) if cwd else None, env={**inherited, "OMP_NUM_THREADS": "1", **(env or {})}
        )
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)
        self.pid = self.manager.provisioner.process.pid
        if load:
            shown = self.run("%load_ext ddl_magics")
            assert shown.ename is None, shown.text

    def send(self, code: str, *, allow_stdin: bool = True) -> str:
        """Send a cell; `result` waits for it."""
        return self.client.execute(code, allow_stdin=allow_stdin)

    def run(self, code: str, timeout: float = 60, **kwargs) -> Shown:
        """Run a cell to its end."""
        return self.result(self.send(code, **kwargs), timeout)

    def result(self, msg_id: str, timeout: float = 60, until=None) -> Shown:
        """What a cell showed, once it is idle; `until(shown)` returns as soon as it is true."""
        shown, began, places = Shown(), time.monotonic(), {}
        while True:
            left = began + timeout - time.monotonic()
            try:
                msg = self.client.get_iopub_msg(timeout=max(0.01, left))
            except queue.Empty:
                raise TimeoutError(f"the cell is not over after {timeout} s; so far:\n{shown.text}") from None
            if msg["parent_header"].get("msg_id") != msg_id:
                continue
            if msg["msg_type"] == "status" and msg["content"]["execution_state"] == "idle":
                shown.seconds = time.monotonic() - began
                return shown
            self._take(shown, msg, places)
            if until and until(shown):
                return shown

    @staticmethod
    def _take(shown: Shown, msg: dict, places: dict) -> None:
        kind, content = msg["msg_type"], msg["content"]
        shown.messages += 1
        if kind == "stream":
            shown.bytes += len(content["text"])
            setattr(shown, content["name"], getattr(shown, content["name"]) + content["text"])
        elif kind in {"display_data", "execute_result"}:
            display_id = content.get("transient", {}).get("display_id")
            places[display_id] = len(shown.displays)
            shown.displays.append(content["data"])
        elif kind == "update_display_data":
            shown.updates += 1
            place = places.get(content["transient"]["display_id"])
            if place is not None:
                shown.displays[place] = content["data"]
        elif kind == "execute_input":
            shown.number = content["execution_count"]
        elif kind == "error":
            shown.ename, shown.evalue = content["ename"], content["evalue"]
            shown.traceback = ANSI.sub("", "\n".join(content["traceback"]))

    def late(self, msg_id: str, wanted: str, timeout: float = 10) -> str:
        """Text that arrives for a cell after its end, until it contains `wanted`."""
        text, deadline = "", time.monotonic() + timeout
        while wanted not in text:
            msg = self.client.get_iopub_msg(timeout=max(0.01, deadline - time.monotonic()))
            if msg["parent_header"].get("msg_id") == msg_id and msg["msg_type"] == "stream":
                text += msg["content"]["text"]
        return text

    def answer(self, lines: list[str], timeout: float = 30) -> list[str]:
        """Type lines at the prompts of the cell that runs, one each; what the prompts said."""
        prompts = []
        for line in lines:
            prompts.append(self.client.get_stdin_msg(timeout=timeout)["content"]["prompt"])
            self.client.input(line)
        return prompts

    def value(self, expression: str):
        """A plain value of the kernel, by its repr."""
        reply = self.client.execute(f"__value__ = repr({expression}); print(__value__, end='')")
        shown = self.result(reply)
        assert shown.ename is None, shown.text
        return eval(shown.stdout)  # the kernel is ours

    def interrupt(self) -> None:
        """The square button."""
        os.kill(self.pid, signal.SIGINT)

    def reconnect(self) -> None:
        """Close the browser, and open it again."""
        self.client.stop_channels()
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def kill(self) -> None:
        """End the kernel without a word."""
        os.kill(self.pid, signal.SIGKILL)
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.context.destroy(linger=0)

    def close(self) -> None:
        """Shut down as Jupyter does."""
        self.client.stop_channels()
        self.manager.shutdown_kernel()
        self.manager.context.destroy(linger=0)


def wait_for(condition, timeout: float = 10, what: str = "") -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout} s: {what or condition}"
        time.sleep(0.02)


def lines_of(rank: int, text: str) -> list[str]:
    """The lines of one rank in a cell's output, whether they were folded with those of other ranks or not."""
    found = []
    for label, line in re.findall(r"^\[([\d,-]+)\] ?(.*)$", text, re.MULTILINE):
        spans = [part.split("-") for part in label.split(",")]
        if any(int(span[0]) <= rank <= int(span[-1]) for span in spans):
            found.append(line)
    return found


HOLD = """import os, time
until = time.time() + 30
while not os.path.exists({path!r}) and time.time() < until:
    time.sleep(0.02)
"""
"""Code that holds a rank up until there is a file `path`; the time limit is for a test that fails."""


def alive(pids: list[int]) -> list[int]:
    """Those of the processes that still run."""
    running = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                running.append(pid)
        except psutil.NoSuchProcess:
            continue
    return running
