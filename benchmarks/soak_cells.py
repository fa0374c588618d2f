"""The cells of the soak, each with the verdict that is right for it.

In the code of a cell `W` stands for the rank that fails, and two comments are marks: `# fails` on the line where it
does and `# waits` on the line where the others are then. `happened()`, which the set-up defines on each rank, writes
down the moment, in Unix time. What a cell showed is judged by `problems`: an empty list is the right verdict.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ddl_magics.views.ranges import in_words

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.notebook import Shown

Ending = Literal["good", "raises", "all raise", "stop", "timeout", "in vain", "dies", "killed"]
"""How a cell ends. `stop`: by the kernel's interrupt; `killed`: the rank dies between two cells."""

TIMEOUT_S = 2
"""Seconds that cells which hang may run, where a timeout ends them."""

STRATEGIES = ("ddp", "zero:2", "axonn:2x1x1")
"""Of the prepared models that must go on."""

GLOOS_WORDS = "Connection closed by peer"
"""What a freed rank's own error says: never the cause, and never shown."""


@dataclass(frozen=True)
class Kind:
    """One cell, and how it must end."""

    row: str
    """Of the table that it is counted in."""
    ending: Ending
    code: str
    cause: str = ""
    """The beginning of the first error, or of how the rank died."""
    where: str = ""
    """What the others wait in; empty: it depends."""
    steps: str = ""
    """The strategy whose model makes a training step in it."""

    def drawn(self, rank: int, n: int) -> Cell:
        """The cell, with the rank that fails put in."""
        return Cell(self, rank, n)


class Cell:
    """A kind with its failing rank, among `n` ranks."""

    def __init__(self, kind: Kind, rank: int, n: int) -> None:
        self.kind, self.rank, self.n = kind, rank, n
        option = f" --timeout {TIMEOUT_S}" if kind.ending == "timeout" else ""
        self.code = re.sub(r"\bW\b", str(rank), f"%%ddl{option}\n{kind.code}")
        self.others = in_words([other for other in range(n) if other != rank])

    def line(self, mark: str) -> int:
        """The line with this mark, counted as the notebook does; 0 where there is none."""
        return next((number for number, line in enumerate(self.code.splitlines(), 1) if f"# {mark}" in line), 0)

    def notice(self) -> str:
        """What stands on the screen as soon as the cause does."""
        return {
            "raises": f"rank {self.rank} failed in line",
            "all raise": " failed in line",
            "stop": "KeyboardInterrupt",
            "timeout": f"the cell was stopped after {TIMEOUT_S} s",
            "in vain": "waited in vain",
            "dies": f"rank {self.rank} died",
            "killed": f"rank {self.rank} died",
        }[self.kind.ending]

    def problems(self, shown: Shown) -> list[str]:
        """What is wrong with how the cell ended, in words."""
        error = shown.evalue
        ename, *pieces = self._expected()
        found = [] if shown.ename == ename else [f"ended with {shown.ename} instead of {ename}: {error}"]
        found += [f"says {error!r}, without {piece!r}" for piece in pieces if piece not in error]
        if GLOOS_WORDS in shown.text:
            found.append(f"shows what gloo says of a closed connection: {shown.text}")
        if self.kind.ending == "raises" and not re.search(re.escape(self.kind.cause) + "[^;]*; freed: ", error):
            found.append(f"does not say who was freed after the cause: {error!r}")
        if self.kind.ending == "good" and "right" not in shown.stdout:
            found.append(f"a wrong result: {shown.stdout!r}")
        return found

    def _expected(self) -> Iterator[str | None]:
        """The error's name, and parts of its message."""
        kind, rank = self.kind, self.rank
        failed = f" failed in line {self.line('fails')} of the cell with {kind.cause}"
        waits = f"in {kind.where}, line {self.line('waits')}"
        if kind.ending == "good":
            yield None
        elif kind.ending == "raises":
            yield from ("CellError", f"rank {rank}{failed}", "; variables are kept")
            yield from [f"freed: {self.others} {waits}"] * bool(kind.where)
        elif kind.ending == "all raise":
            who = in_words(range(self.n)) if "everywhere" in kind.cause else f"rank {rank}"
            yield from ("CellError", f"{who}{failed}")
        elif kind.ending == "stop":
            yield from ("KeyboardInterrupt", "the cell was stopped on every rank")
        elif kind.ending == "timeout":
            yield from ("CellError", f"the cell was stopped after {TIMEOUT_S} s, ")
            alike = self.code == kind.drawn(rank + 1, self.n).code  # all ranks wait
            who = in_words(range(self.n)) if alike else self.others
            yield from [f"{who} {waits}"] * bool(kind.where)
        elif kind.ending == "in vain":
            yield from ("CellError", f"rank {rank} {waits} waited in vain: {self.others} ended the cell without it")
        else:
            yield from ("RankDiedError", f"rank {rank} died ({kind.cause}", "%ddl restart")


FAILS = "if rank == W:\n    happened()\n    raise ValueError('boom')  # fails\n"
FAILS_LATE = "if rank == W:\n    time.sleep(0.7)\n    happened()\n    raise ValueError('boom')  # fails\n"
TRAINS = "model, _ = models['{0}']\nloss = model(x, labels)['loss']\nddl.backward(loss, model=model)  # waits\n"
HERE = "print('here', flush=True)\n"


def _raises(row: str, code: str, where: str = "", cause: str = "ValueError: boom") -> Kind:
    return Kind(f"a rank raises; the others {row}", "raises", code, cause, where)


GOOD = [
    Kind("none", "good", code)
    for code in (
        (
            "t = torch.full((1000,), rank + 1.0)\ndist.all_reduce(t)\n"
            "print('right' if t[0] == world_size * (world_size + 1) / 2 else t)"
        ),
        (
            "found = [None] * world_size\ndist.all_gather_object(found, 'x' * rank)\n"
            "print('right' if found == ['x' * r for r in everybody] else found)"
        ),
        (
            "group = dist.new_group(everybody)\nt = torch.full((3,), float(rank))\n"
            "dist.broadcast(t, src=W, group=group)\nprint('right' if t[0] == W else t)"
        ),
        (
            "got = torch.zeros(1)\nwork = dist.isend(torch.full((1,), float(rank)), (rank + 1) % world_size)\n"
            "dist.recv(got, (rank - 1) % world_size)\nwork.wait()\n"
            "print('right' if got[0] == (rank - 1) % world_size else got)"
        ),
        "print('right' if ddl.all_gather(rank) == everybody else 'no')\nddl.barrier()",
    )
] + [
    Kind("none", "good", f"print('right' if step_of('{name}') else 'a wrong loss')", steps=name) for name in STRATEGIES
]  # fmt: skip

RAISES = [
    _raises("wait in the default group", f"{FAILS}dist.all_reduce(torch.ones(3))  # waits", "all_reduce"),
    _raises("wait in the default group", f"{FAILS_LATE}dist.barrier()  # waits", "barrier"),
    _raises("wait in the default group", f"{FAILS_LATE}dist.broadcast(torch.ones(9), src=W)  # waits", "broadcast"),
    _raises("wait in the default group", f"{FAILS}ddl.barrier()  # waits", "ddl.barrier"),
    _raises(
        "wait in the default group",
        "try:\n    if rank == W:\n        happened()\n        raise OSError('the cause')  # fails\n"
        "    dist.barrier()  # waits\nexcept RuntimeError as error:\n    raise OSError('all is lost') from error",
        "barrier",
        "OSError: the cause",
    ),
    _raises(
        "wait in the collective that it raises in",
        "class Odd:\n    def __reduce__(self):\n        happened()\n        raise TypeError('not sent')  # fails\n"
        "dist.all_gather_object([None] * world_size, Odd() if rank == W else 1)  # waits",
        "all_gather",
        "TypeError: not sent",
    ),
    _raises(
        "wait in the collective that it raises in",
        "if rank == W:\n    happened()\ndist.all_reduce('text' if rank == W else torch.ones(3))  # waits # fails",
        "all_reduce",
        "TypeError: ",
    ),
    _raises(
        "wait in a subgroup",
        f"group = dist.new_group(everybody)\n{FAILS}dist.broadcast(torch.ones(3), src=W, group=group)  # waits",
        "broadcast",
    ),
    _raises("wait in a subgroup", f"{FAILS}group = dist.new_group(everybody)  # waits", "new_group"),
    _raises("wait for a message", f"{FAILS}dist.recv(torch.ones(3), W)  # waits", "recv"),
    _raises("wait for a message", f"{FAILS_LATE}dist.recv(torch.ones(3), W)  # waits", "recv"),
    *[_raises("wait in a training step", FAILS + TRAINS.format(name)) for name in STRATEGIES],
    *[
        _raises(
            "wait in a backward that it raises in",
            "def fail(gradient):\n    hook.remove()\n    happened()\n"
            "    raise ArithmeticError('in backward')  # fails\n"
            f"if rank == W:\n    hook = next(models['{name}'][0].parameters()).register_hook(fail)\n"
            + TRAINS.format(name),
            cause="ArithmeticError: in backward",
        )
        for name in STRATEGIES
    ],
    _raises(
        "wait in a backward that it raises in",
        "plain = DistributedDataParallel(torch.nn.Linear(64, 64))\n"
        "def fail(gradient):\n    happened()\n    raise ArithmeticError('in backward')  # fails\n"
        "if rank == W:\n    plain.module.weight.register_hook(fail)\n"
        "plain(torch.ones(4, 64)).sum().backward()  # waits",
        "all_reduce",
        "ArithmeticError: in backward",
    ),
    *[
        _raises(
            "wait, with DataLoader workers alive",
            f"batches = iter(DataLoader(Slow(), num_workers=2))\nnext(batches)\n{FAILS}{waits}  # waits",
            where,
        )
        for waits, where in (("dist.all_reduce(torch.ones(3))", "all_reduce"), ("ddl.barrier()", "ddl.barrier"))
    ],
    _raises(
        "wait, with DataLoader workers alive",
        "if rank == W:\n    next(iter(DataLoader(Broken(), num_workers=1)))  # fails\ndist.barrier()  # waits",
        "barrier",
        "OSError: Caught OSError in DataLoader worker process 0.",
    ),
]

ALL_RAISE = [
    Kind(
        "all ranks raise", "all raise", "happened()\nraise ValueError('everywhere')  # fails", "ValueError: everywhere"
    ),
    Kind(
        "all ranks raise",
        "all raise",
        "dist.barrier()\nif rank != W:\n    time.sleep(0.5)\n    raise KeyError('second')\n"
        "happened()\nraise ValueError('first')  # fails",
        "ValueError: first",
    ),
]

STUCK = {
    "all_reduce against barrier": (
        "if rank == W:\n    dist.all_reduce(torch.ones(3))\nelse:\n    dist.barrier()  # waits", "barrier"),
    "a ring of recv": ("dist.recv(torch.ones(1), (rank + 1) % world_size)  # waits", "recv"),
    "a loop, and a barrier": ("while rank == W:\n    pass\ndist.barrier()  # waits", "barrier"),
    "a loop everywhere": ("while True:\n    time.sleep(0.01)", ""),
    "a subgroup against the default one": (
        "group = dist.new_group(everybody)\nif rank == W:\n    dist.barrier(group)\nelse:\n    dist.barrier()  # waits",
        "barrier"),
    "a call of the context": ("if rank == W:\n    time.sleep(600)\nddl.barrier()  # waits", "ddl.barrier"),
    **{f"asleep, {name}": (f"if rank == W:\n    time.sleep(600)\n{TRAINS.format(name)}", "") for name in STRATEGIES},
}  # fmt: skip
"""Cells that never end, and what the others than rank W are in."""


def _stuck(ending: Ending, row: str) -> list[Kind]:
    return [Kind(row, ending, f"{HERE}{code}", where=where) for code, where in STUCK.values()]


STOP = _stuck("stop", "all hang; Stop")
TIMEOUT = _stuck("timeout", "all hang; --timeout")

IN_VAIN = [
    Kind(
        "a rank waits for ranks that ended the cell",
        "in vain",
        f"if rank == W:\n    {call}  # waits\nelse:\n    happened()",
        where=where,
    )
    for call, where in (
        ("ddl.barrier()", "ddl.barrier"),
        ("dist.all_reduce(torch.ones(3))", "all_reduce"),
        ("dist.recv(torch.ones(3), (W + 1) % world_size)", "recv"),
    )
]

DIES = [
    Kind(
        "a rank dies in a cell",
        "dies",
        f"if rank == W:\n    print('last words', flush=True)\n    time.sleep(0.5)\n    happened()\n    {code}\n"
        "dist.all_reduce(torch.ones(3))",
        cause,
    )
    for code, cause in (
        ("os.kill(os.getpid(), 9)", "signal 9 Killed"),
        ("os._exit(3)", "exit code 3"),
        ("import ctypes; ctypes.string_at(0)", "signal 11 Segmentation fault"),
    )
]
KILLED = [Kind("a rank is killed between cells", "killed", "'idle now'", "signal 9 Killed")]

SHARES = [
    (GOOD, 25), (RAISES, 40), (ALL_RAISE, 5), (STOP, 11), (TIMEOUT, 6), (IN_VAIN, 5), (DIES, 5), (KILLED, 3),
]  # fmt: skip
"""How many of a hundred cells are drawn from each list."""
