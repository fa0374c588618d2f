"""The debugger in a notebook: a prompt where a rank failed, and where ranks stop at a breakpoint."""

from __future__ import annotations

import queue
import time

import pytest

from tests.notebook import lines_of, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]

FAILS_ON_RANK_1 = """%%ddl
import torch, torch.distributed as dist
def combine(x):
    size = x + 1
    return torch.ones(2) @ torch.ones(size)
if rank == 1:
    combine(2)
dist.barrier()
"""

STOPS_ON_RANK_1 = """%%ddl
import torch, torch.distributed as dist
x = torch.ones(2) * (rank + 1)
print("before", flush=True); dist.barrier()
if rank == 1:
    breakpoint()
    x += 10
dist.all_reduce(x)
float(x.sum())
"""


ASKED = {"rank all": "ddl ranks 0-1> ", "rank 1": "ddl rank 1> "}
"""What the prompt says once these ranks are asked."""


def each_for_all(*lines):
    """Lines that both ranks are to be asked, each only when both have come to a stop."""
    return [typed for line in lines for typed in ("rank all", line)]


def type_in(book, lines, timeout=30):
    """As `answer`; `rank all` is typed again until both ranks have stopped, which need not be at the same moment."""
    prompts, last = [], ""
    for line in lines:
        deadline = time.monotonic() + timeout
        while True:
            prompt = book.client.get_stdin_msg(timeout=timeout)["content"]["prompt"]
            if prompt == ASKED.get(last, prompt):
                break
            assert time.monotonic() < deadline, f"{prompt!r} after {last!r}"
            time.sleep(0.05)
            book.client.input(last)
        prompts.append(prompt)
        book.client.input(line)
        last = line
    return prompts


def debug(book, lines, code="%ddl debug", timeout=30):
    """Type lines at the prompts of a cell; the prompts and what the cell showed in the end."""
    cell = book.send(code)
    prompts = type_in(book, lines, timeout)
    return prompts, book.result(cell, timeout)


def no_prompt_comes(book, seconds=0.2):
    with pytest.raises(queue.Empty):
        book.client.get_stdin_msg(timeout=seconds)


def test_the_prompt_opens_in_the_failed_frame_of_the_rank_that_failed_first(ranks2):
    failed = ranks2.run(FAILS_ON_RANK_1)
    assert failed.ename == "CellError"
    assert "%ddl debug opens a prompt in the failed frame" in failed.evalue
    prompts, shown = debug(ranks2, ["p size", "up", "down", "size * 2", "where", "list", "next", "help", "q"])
    assert set(prompts) == {"ddl rank 1> "}
    assert shown.ename is None
    said = shown.stdout.splitlines()
    assert said[0].startswith("RuntimeError: inconsistent tensor size")
    assert said[1:3] == [f"> In[{failed.number}](5)combine()", "-> return torch.ones(2) @ torch.ones(size)"]
    assert said[3] == "3"
    assert said[4] == f"> In[{failed.number}](7)<module>()"
    assert "6" in said
    assert "  5  ->\t    return torch.ones(2) @ torch.ones(size)" in shown.stdout
    assert "has ended on this rank" in shown.stdout
    assert "`rank all`" in shown.stdout


def test_a_rank_that_was_freed_from_a_collective_can_be_looked_into_too(ranks2):
    ranks2.run(FAILS_ON_RANK_1)
    prompts, shown = debug(ranks2, ["rank 0", "p rank", "rank all", "p world_size - rank", "rank 5", "q"])
    asked = ["rank 1", "rank 0", "rank 0", "ranks 0-1", "ranks 0-1", "ranks 0-1"]
    assert prompts == [f"ddl {ranks}> " for ranks in asked]
    assert "-> dist.barrier()" in shown.stdout
    assert "[0] 2\n[1] 1\n" in shown.stdout
    assert "rank 5 cannot be asked" in shown.stdout


def test_commands_run_without_a_prompt_where_nobody_can_type(ranks2):
    ranks2.run(FAILS_ON_RANK_1)
    shown = ranks2.run('%ddl debug --rank 1 -c "p size" -c "size = 5;; p size + 1"', allow_stdin=False)
    assert shown.ename is None
    assert shown.stdout.endswith("3\n6\n")
    refused = ranks2.run("%ddl debug", allow_stdin=False)
    assert refused.ename == "DebugError"
    assert '-c "p x"' in refused.evalue


def test_an_endless_command_and_one_that_waits_for_other_ranks_can_be_stopped(ranks2):
    ranks2.run("%%ddl\nimport torch, torch.distributed as dist\n1 / rank")  # rank 0 fails, and the group stays whole
    cell = ranks2.send("%ddl debug")
    for line in ("while True: pass", "dist.all_reduce(torch.ones(1))"):
        ranks2.answer([line])
        no_prompt_comes(ranks2, 0.5)
        ranks2.interrupt()
    ranks2.answer(["p 'still here'", "q"])
    shown = ranks2.result(cell)
    assert "*** KeyboardInterrupt" in shown.stdout
    assert "still here" in shown.stdout
    after = ranks2.run("%%ddl\nx = torch.ones(1)\ndist.all_reduce(x)\nint(x)", timeout=30)
    assert "[0-1] 2" in after.text, after.text


def test_the_tensors_that_were_looked_at_are_free_at_the_next_cell(ranks2):
    ranks2.run(
        "%%ddl\nimport torch, weakref\ndef grow():\n    global watch\n    big = torch.ones(10)\n"
        "    watch = weakref.ref(big)\n    raise ValueError\ngrow()"
    )
    shown = ranks2.run('%ddl debug --rank all -c "p big.sum()" -c "again = big" -c "up" -c "p watch() is not None"')
    assert "[0-1] tensor(10.)\n" in shown.stdout
    assert "[0-1] True\n" in shown.stdout
    assert "[0-1] True" in ranks2.run("%%ddl\nwatch() is None").text


def test_after_a_lack_of_memory_the_frames_go_at_once_unless_they_are_asked_for(ranks2):
    code = (
        "import torch, weakref\ndef grow():\n    big = torch.ones(10)\n"
        "    weakref.finalize(big, lambda: print('freed'))\n    raise torch.OutOfMemoryError('full')\ngrow()"
    )
    shown = ranks2.run(f"%%ddl\n{code}")
    assert shown.ename == "CellError"
    assert "freed" in shown.stdout
    assert "%%ddl --keep-frames" in shown.evalue
    refused = ranks2.run("%ddl debug")
    assert refused.ename == "DebugError"
    assert "%%ddl --keep-frames" in refused.evalue
    ranks2.run("%%ddl\nif rank == 1:\n    raise torch.OutOfMemoryError('full')\nddl.barrier()")
    assert "rank 1 dropped" in ranks2.run("%ddl debug").evalue  # rather than the prompt of a rank that only waited
    assert "freed" not in ranks2.run(f"%%ddl --keep-frames\n{code}").stdout
    assert ranks2.run('%ddl debug -c "p big.sum()"').stdout.endswith("tensor(10.)\n")


def test_with_nothing_to_debug_one_line_says_so(ranks2):
    ranks2.run("%%ddl\n1")
    for typed, said in {
        "%ddl debug": "no rank failed in the last cell",
        "%ddl debug --rank 7": "no rank 7",
        "%ddl debug --rank x": "not a list of ranks",
    }.items():
        shown = ranks2.run(typed)
        assert said in shown.evalue
        assert len(shown.traceback.strip().splitlines()) == 1
    ranks2.run("%%ddl\nif rank == 0:\n    1 / 0")
    assert "rank 1 did not fail" in ranks2.run("%ddl debug --rank 1").evalue
    ranks2.run("%%ddl\nx = = 1")
    assert "has no frame" in ranks2.run("%ddl debug").evalue


def test_one_rank_stops_while_the_other_waits_and_the_cell_ends_well(ranks2):
    prompts, shown = debug(ranks2, ["p x", "y = x * 2", "p y", "n", "continue"], STOPS_ON_RANK_1)
    assert set(prompts) == {"ddl rank 1> "}
    assert shown.ename is None, shown.text
    assert "rank 1 stopped in line" in shown.stderr
    assert "rank 0 in all_reduce, line 8" in shown.stderr
    above, stop, _ = shown.stdout.partition(f"> In[{shown.number}]")
    assert stop
    assert lines_of(0, above) == lines_of(1, above) == ["before"]
    assert "tensor([2., 2.])\ntensor([4., 4.])\n" in shown.stdout
    assert "[0-1] 26.0" in shown.text


def test_quit_ends_the_cell_on_every_rank_and_the_next_one_runs(ranks2):
    began = time.monotonic()
    _, shown = debug(ranks2, ["q"], STOPS_ON_RANK_1)
    assert time.monotonic() - began < 15
    assert shown.ename == "KeyboardInterrupt"
    assert "Traceback" not in shown.traceback
    after = ranks2.run("%%ddl\nx = torch.ones(1)\ndist.all_reduce(x)\nint(x)", timeout=30)
    assert "[0-1] 2" in after.text, after.text


def test_stop_at_the_prompt_is_quit(ranks2):
    cell = ranks2.send("%%ddl\nimport time\nif rank == 0:\n    breakpoint()\nwhile rank:\n    time.sleep(0.1)")
    ranks2.client.get_stdin_msg(timeout=30)
    ranks2.interrupt()
    assert ranks2.result(cell, 15).ename == "KeyboardInterrupt"
    assert "[0-1] 1" in ranks2.run("%%ddl\n1").text


def test_all_ranks_stop_and_step_and_go_on_together(ranks2):
    code = "%%ddl\ndef f(n):\n    t = n + rank\n    return t\nbreakpoint()\na = f(2)\ntotal = a\nprint('end', total)"
    lines = [*each_for_all("p rank", "n", "step", "next", "n", "p t"), "rank 1", "return", "rank 1", "n", "rank 1"]
    prompts, shown = debug(ranks2, [*lines, *each_for_all("continue")], code)
    assert prompts[0] in {"ddl rank 0> ", "ddl rank 1> "}  # the one that has stopped first
    assert prompts[1] == "ddl ranks 0-1> "
    assert shown.ename is None
    assert "ranks 0-1 stopped in line 5" in shown.stderr
    assert "[0] 0\n[1] 1\n" in shown.stdout
    assert "[0-1] -> a = f(2)" in shown.stdout
    assert "[0] 2\n[1] 3\n" in shown.stdout
    assert f"> In[{shown.number}](7)<module>()\n-> total = a" in shown.stdout
    assert "[0] end 2\n" in shown.stdout
    assert "[1] end 3\n" in shown.stdout


def test_where_nobody_can_be_asked_the_cell_goes_on(ranks2):
    shown = ranks2.run("%%ddl\nfor i in range(50):\n    breakpoint()\n'over'", allow_stdin=False)
    assert shown.ename is None
    assert "[0-1] 'over'" in shown.text
    assert "cannot ask for input" in shown.stderr
    assert len(shown.stderr.splitlines()) <= 2


def test_in_the_background_debug_opens_the_prompt(ranks2):
    cell = ranks2.send("%%ddl --bg -o told\nfactor = 3\nbreakpoint()\nfactor + 1")
    if "%ddl debug opens a prompt" not in ranks2.result(cell).stderr:
        ranks2.late(cell, "%ddl debug opens a prompt")
    _, shown = debug(ranks2, each_for_all("factor = 4", "c"), "%ddl debug --rank all")
    assert "stopped in line 3" in shown.stderr
    assert ranks2.run("%ddl wait").ename is None
    assert ranks2.value("told") == [5, 5]


def test_the_time_at_a_breakpoint_does_not_count(ranks2):
    cell = ranks2.send("%%ddl --timeout 3\nbreakpoint()\n'over'")
    type_in(ranks2, ["rank all", "p 1"])  # both ranks have stopped
    ranks2.client.get_stdin_msg(timeout=30)
    time.sleep(3.5)  # longer than the cell may run
    ranks2.client.input("c")
    shown = ranks2.result(cell)
    assert shown.ename is None, shown.text
    assert "'over'" in shown.text


def test_what_cannot_be_served_says_so_and_goes_on(ranks2):
    shown = ranks2.run(
        "%%ddl\nimport os, threading\nfrom torch.utils.data import DataLoader\n"
        "class Numbers:\n    def __len__(self):\n        return 1\n"
        "    def __getitem__(self, at):\n        breakpoint()\n        return at\n"
        "print([int(number) for number in DataLoader(Numbers(), num_workers=1)])\n"
        "thread = threading.Thread(target=breakpoint)\nthread.start()\nthread.join()\n"
        "os.environ['PYTHONBREAKPOINT'] = '0'\nbreakpoint()\ndel os.environ['PYTHONBREAKPOINT']\n'over'",
        timeout=30,
    )
    assert shown.ename is None, shown.text
    assert "[0]\n" in shown.stdout
    assert "in another process" in shown.stderr
    assert "in another thread" in shown.stderr
    assert "[0-1] 'over'" in shown.text


def test_pdb_stops_too_and_after_the_cell_all_is_as_it_was(ranks2):
    _, shown = debug(ranks2, ["p pdb.__name__", "c"], "%%ddl\nimport pdb\nif rank == 1:\n    pdb.set_trace()\n'over'")
    assert "pdb" in shown.stdout
    assert "'over'" in shown.text
    left = "sys.gettrace() is None, '__return__' in globals(), pdb.set_trace.__module__"
    told = ranks2.run(f"%%ddl\nimport sys\n{left}").text
    assert "[0-1] (True, False, 'ddl_magics.rank.breakpoints')" in told  # while a cell runs


def test_wait_opens_the_prompt_of_a_cell_in_the_background_and_steps_stay_in_it(ranks2):
    ranks2.run("%%ddl --bg\nimport time\ntime.sleep(0.5)\nbreakpoint()\nfirst = 1\nsecond = 2")
    _, shown = debug(ranks2, each_for_all("n", "n", "p first", "c"), "%ddl wait")
    assert shown.ename is None, shown.text
    assert "[0-1] -> second = 2" in shown.stdout
    assert "[0-1] 1\n" in shown.stdout


def test_a_second_breakpoint_is_told_again_and_quit_in_the_background_ends_the_cell(ranks2):
    ranks2.run("%%ddl --bg\nfor turn in range(3):\n    breakpoint()\n    turn")
    _, shown = debug(ranks2, each_for_all("p turn", "c", "p turn", "q"), "%ddl wait")
    assert shown.ename == "KeyboardInterrupt"
    assert shown.stderr.count("ranks 0-1 stopped in line 4") == 2
    assert "0\n" in shown.stdout
    assert "[0-1] 1" in ranks2.run("%%ddl\n1").text


def test_commands_reach_a_cell_in_the_background_without_a_prompt(ranks2):
    ranks2.run("%%ddl --bg -o told\nimport time\ntime.sleep(0.2)\nbreakpoint()\nfactor = 2\nfactor")
    look = '%ddl debug --rank all -c "p rank"'
    wait_for(lambda: "[1] 1\n" in ranks2.run(look, allow_stdin=False).stdout, 20, "both ranks at the breakpoint")
    shown = ranks2.run('%ddl debug --rank all -c n -c n -c "factor = 7" -c "p factor" -c c', allow_stdin=False)
    assert shown.ename is None, shown.text
    assert "[0-1] -> factor\n" in shown.stdout
    assert "[0-1] 7\n" in shown.stdout
    assert ranks2.run("%ddl wait").ename is None
    assert ranks2.value("told") == [7, 7]
