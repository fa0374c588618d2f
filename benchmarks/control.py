"""How soon ranks answer a request out of band (`state`), while they are idle and while they compute.

Asked from the kernel, each rank in turn and over and over, over the engines' control channel; the cell runs in the
background. Pure Python holds the interpreter's lock, from which the control thread must get its turn; torch lets it go.
"""

from __future__ import annotations

import argparse
import os

from benchmarks.measure import CountingNotebook, close, ddl, grid, machine

PROMISED_MS = 200
"""On an idle machine, also while 8 ranks compute."""

ASK = """
def ask(seconds, pause=0.02):
    import threading, time
    client = get_ipython().find_line_magic('ddl').__self__.session.cells.cluster.client
    taken, end = [], time.monotonic() + seconds
    while time.monotonic() < end:
        for rank in client.engine_of:
            answered, began = threading.Event(), time.perf_counter()
            def told(future):
                taken.append(1000 * (time.perf_counter() - began))
                answered.set()
            client.ask('state', [rank])[rank].add_done_callback(told)
            assert answered.wait(30), f'rank {rank} does not answer'
        time.sleep(pause)
    return sorted(taken)
"""

BUSY = {
    "pure Python": "i = 0\nwhile time.time() < end:\n    i += 1",
    "torch (matrix products)": "while time.time() < end:\n    a = (a @ a).clamp(-1, 1)",
}


def asked(notebook: CountingNotebook, seconds: float, busy: str) -> list[float]:
    """Milliseconds of each answer, the shortest first, while all ranks do something; empty: they are idle."""
    if busy:
        before = "import time, torch\na = torch.rand(700, 700)\nprint('begun', flush=True)\n"
        notebook.run(f"%%ddl --bg\n{before}end = time.time() + {seconds + 2}\n{busy}")
        notebook.run("import time; time.sleep(1)")
    notebook.run(f"taken = ask({seconds})")
    if busy:
        notebook.run("%ddl wait")
    return notebook.value("taken")


def report(*, quick: bool) -> str:
    """A table."""
    where, lines = machine(), []
    for ranks in (2,) if quick else (2, 8):
        notebook = ddl(ranks)
        notebook.run(ASK)
        for name, busy in {"nothing": "", **BUSY}.items():
            taken = asked(notebook, 2 if quick else 8, busy)
            load = f"{os.getloadavg()[0]:.1f}"
            shares = [taken[int(share * (len(taken) - 1))] for share in (0.5, 0.95, 1.0)]
            late = sum(ms > PROMISED_MS for ms in taken)
            lines.append([str(ranks), name, str(len(taken)), *(f"{ms:.1f}" for ms in shares), str(late), load])
        close(notebook)
    head = ["ranks", "they compute", "answers", "p50, ms", "p95, ms", "max, ms", f"over {PROMISED_MS} ms", "load after"]
    return f"{where}\n\n{grid(head, lines)}"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a first look: 2 ranks, fewer answers")
    print(report(quick=parser.parse_args().quick))


if __name__ == "__main__":
    main()
