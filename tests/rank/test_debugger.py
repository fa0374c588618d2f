"""The debugger's commands, without ranks: what a line gives, which frame comes first, and where a step stops."""

# ruff: noqa: T100 - a debugger is under test

from __future__ import annotations

import ast
import gc
import linecache
import pdb
import sys
import textwrap
import threading

import pytest
import torch

from ddl_magics.rank.breakpoints import Breakpoints
from ddl_magics.rank.debugger import MOST, Commands, FailedFrames, is_own
from ddl_magics.rank.postmortem import out_of_memory
from ddl_magics.rank.stepper import Stepper

CELL = "/cells/5.py"


def is_cell(filename):
    return filename.startswith("/cells/")


def name_of(filename):
    return "In[5]" if is_cell(filename) else filename


def run_cell(code, namespace):
    """Run the statements of a cell one by one, as IPython does."""
    code = textwrap.dedent(code)
    linecache.cache[CELL] = (len(code), None, code.splitlines(keepends=True), CELL)
    for node in ast.parse(code).body:
        exec(compile(ast.Module([node], []), CELL, "exec"), namespace)


def failed(code, namespace=None):
    """The frames of a cell that fails."""
    try:
        run_cell(code, {} if namespace is None else namespace)
    except Exception as error:
        return FailedFrames(error, is_cell, name_of)
    raise AssertionError("the cell did not fail")


DIVIDE = """
def divide(a):
    twice = a * 2
    return twice / 0

divide(21)
"""


@pytest.fixture
def frames():
    return failed(DIVIDE)


def test_the_failed_frame_comes_first_and_is_called_by_its_cell(frames):
    assert frames.taken() == "> In[5](4)divide()\n-> return twice / 0\n"


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("p twice", "42\n"),
        ("twice + 1", "43\n"),
        ("pp {'a': a}", "{'a': 21}\n"),
        ("whatis a", "<class 'int'>\n"),
        ("args", "a = 21\n"),
        ("new = 7;; p new", "7\n"),
        ("print('seen')", "seen\n"),
        ("up", "> In[5](6)<module>()\n-> divide(21)\n"),
        ("up;;p a", "> In[5](6)<module>()\n-> divide(21)\n*** NameError: name 'a' is not defined\n"),
        ("up;;down", "> In[5](6)<module>()\n-> divide(21)\n> In[5](4)divide()\n-> return twice / 0\n"),
        ("down", "*** Newest frame\n"),
        ("here", "> In[5](4)divide()\n-> return twice / 0\n"),
        ("nothing_there", "*** NameError: name 'nothing_there' is not defined\n"),
        ("1 +", "*** SyntaxError: invalid syntax\n"),
    ],
)
def test_commands_and_expressions_answer_as_pdb_does(frames, line, answer):
    frames.taken()
    assert frames.execute(line) == (answer, False)


def test_the_exceptions_that_led_to_a_failure_can_be_looked_at():
    frames = failed(
        """
        def read(key):
            return {}[key]

        try:
            read("size")
        except KeyError as error:
            raise ValueError("no size") from error
        """
    )
    frames.taken()
    assert frames.execute("exceptions")[0] == "  0 KeyError('size')\n> 1 ValueError('no size')\n"
    assert frames.execute("exceptions 0")[0] == "> In[5](3)read()\n-> return {}[key]\n"
    assert frames.execute("p key")[0] == "'size'\n"
    assert frames.execute("exceptions 2")[0] == "*** there is no exception 2\n"


def test_where_shows_the_frames_of_the_user_and_not_what_runs_cells(frames):
    frames.taken()
    where, _ = frames.execute("where")
    assert where.splitlines() == ["  In[5](6)<module>()", "-> divide(21)", "> In[5](4)divide()", "-> return twice / 0"]


def test_list_shows_the_lines_of_the_cell_with_the_failed_one_marked(frames):
    frames.taken()
    assert "  4  ->\t    return twice / 0" in frames.execute("list")[0]


def test_below_the_frame_of_the_user_a_library_is_reached_by_down():
    frames = failed("import textwrap\ntextwrap.indent(3, '')")
    assert frames.taken().startswith("> In[5](2)<module>()")
    assert "textwrap.py" in frames.execute("down")[0]


@pytest.mark.parametrize("line", ["next", "s", "continue", "jump 2", "break 3"])
def test_a_cell_that_has_failed_cannot_go_on(frames, line):
    frames.taken()
    answer, goes_on = frames.execute(line)
    assert "has ended" in answer
    assert not goes_on


@pytest.mark.parametrize("line", ["interact", "debug f()", "commands", "run", "p 1;;quit", "EOF"])
def test_what_would_read_from_a_terminal_says_so_and_the_prompt_stays(frames, line):
    answer, goes_on = frames.execute(line)
    assert "***" in answer
    assert not goes_on


def test_help_lists_what_can_be_done_here(frames):
    frames.taken()
    words = frames.execute("help")[0].split()
    assert {"up", "where", "pp", "here"} <= set(words)
    assert not {"interact", "next", "continue", "quit", "debug"} & set(words)


def test_an_answer_is_cut_in_the_middle(frames):
    answer, _ = frames.execute(f"p 'x' * {3 * MOST}")
    assert len(answer) < MOST + 100
    assert "characters left out" in answer


def test_an_interrupt_ends_the_line_and_not_the_prompt(frames):
    frames.taken()
    assert frames.execute("up;;raise KeyboardInterrupt")[0].endswith("*** KeyboardInterrupt\n")
    assert frames.execute("p 1") == ("1\n", False)


def test_code_of_the_user_is_told_from_libraries():
    assert is_own(CELL)
    assert is_own(__file__)
    assert not is_own(torch.__file__)
    assert not is_own(textwrap.__file__)
    assert not is_own(sys.modules[Commands.__module__].__file__)
    assert not is_own("<string>")


def test_a_lack_of_memory_is_known_also_behind_another_error():
    assert out_of_memory(torch.OutOfMemoryError("full"))
    assert out_of_memory(MemoryError())
    wrapped = RuntimeError("while training")
    wrapped.__context__ = MemoryError()
    assert out_of_memory(wrapped)
    assert not out_of_memory(RuntimeError("full"))
    assert not out_of_memory(None)


class Program:
    """A cell that stops, and the lines that are typed at its stops."""

    def __init__(self, *lines):
        self.lines = list(lines)
        self.stops = []
        self.answers = []
        self.stepper = Stepper(name_of, is_cell, self.serve)

    def serve(self, stepper, frame):
        stepper.show_here()
        self.stops.append(stepper.taken())
        goes_on = False
        while not goes_on:
            answer, goes_on = stepper.execute(self.lines.pop(0))
            self.answers.append(answer)

    def run(self, code):
        namespace = {"stop": lambda: self.stepper.begin(sys._getframe(1))}
        before = sys.gettrace()
        try:
            run_cell(code, namespace)
        finally:
            sys.settrace(before)
            self.stepper.end()
        return namespace

    @property
    def lines_stopped_at(self):
        return [int(stop.split("(", 1)[1].split(")", 1)[0]) for stop in self.stops]


STATEMENTS = """
def double(x):
    y = 2 * x
    return y
stop()
a = double(1)
b = double(a)
c = a + b
"""


@pytest.mark.parametrize(
    ("lines", "stops"),
    [
        (["c"], [5]),
        (["n", "n", "n", "n"], [5, 6, 7, 8]),
        (["s", "s", "s", "s", "s", "s", "c"], [5, 6, 2, 3, 4, 4, 7]),
        (["s", "s", "s", "r", "n", "c"], [5, 6, 2, 3, 4, 7]),
        (["until 8", "c"], [5, 8]),
        (["b 8", "c", "c"], [5, 8]),
        (["b 3", "c", "c", "c"], [5, 3, 3]),
        (["p 1", "n;;p a", "n", "c"], [5, 6, 7]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_steps_go_from_statement_to_statement_of_the_cell(lines, stops):
    program = Program(*lines)
    namespace = program.run(STATEMENTS)
    assert program.lines_stopped_at == stops
    assert namespace["c"] == 6


def test_a_step_passes_through_a_library_to_the_code_that_it_calls():
    program = Program("s", "s", "s", "n", "c")
    program.run("import functools\ndef key(x):\n    return -x\nstop()\nfunctools.reduce(max, map(key, [1]))\nx = 1\n")
    assert program.lines_stopped_at == [4, 5, 2, 3, 3]


def test_a_breakpoint_in_the_last_line_stops_there():
    program = Program("p x", "c")
    program.run("x = 3\nif x:\n    stop()\n")
    assert program.lines_stopped_at == [3]
    assert program.answers[0] == "3\n"


def test_a_breakpoint_in_a_function_stops_in_its_next_line_and_can_change_what_follows():
    program = Program("p x", "x = 10", "jump 5", "c")
    namespace = program.run("def f(x):\n    stop()\n    x += 1\n    x += 100\n    return x\nresult = f(1)\n")
    assert program.answers[0] == "1\n"
    assert namespace["result"] == 10


def test_where_ends_at_the_cell():
    program = Program("where", "c")
    program.run("def f():\n    stop()\n    return 1\nf()\n")
    assert program.answers[0].splitlines()[0] == "  In[5](4)<module>()"


def test_an_error_in_a_step_is_shown_and_raised():
    program = Program("n", "n", "c")
    with pytest.raises(ZeroDivisionError):
        program.run("stop()\nx = 1\n1 / 0\n")
    assert program.lines_stopped_at[:3] == [1, 2, 3]


def test_after_the_cell_nothing_is_traced_and_no_frame_is_held():
    program = Program("b 10", "p big", "c")
    namespace = program.run(
        """
        from weakref import ref

        class Big:
            pass

        def f():
            big = Big()
            stop()
            return ref(big)

        watch = f()
        """
    )
    del program, namespace["stop"]
    gc.collect()  # the two above refer to one another
    assert namespace["watch"]() is None
    assert Program().stepper.breaks == {}


class FakeRank:
    """What breakpoints need of a rank: it types lines, and keeps what is published."""

    def __init__(self, *lines):
        self.lines = list(lines)
        self.published = []
        self.stopped = False
        self.user_ns = {}
        self.shell = self
        self.breakpoints = Breakpoints(self, self)

    def publish(self, kind, content):
        self.published.append((kind, content))
        if kind in {"ddl_stopped", "ddl_debug"}:
            assert self.breakpoints.command(len(self.published), self.lines.pop(0))


@pytest.mark.parametrize("stop", [breakpoint, pdb.set_trace], ids=["breakpoint()", "pdb.set_trace()"])
def test_a_rank_stops_serves_lines_and_goes_on(stop):
    rank = FakeRank("p value", "c")
    with rank.breakpoints.served():
        value = 7
        breakpoint() if stop is breakpoint else pdb.set_trace()
        value += 1
    kinds = [kind for kind, _ in rank.published]
    assert kinds == ["ddl_stopped", "ddl_debug", "ddl_resumed"]
    assert rank.published[0][1]["text"].endswith("-> value += 1\n")
    assert rank.published[1][1]["text"] == "7\n"
    assert not rank.breakpoints.command(9, "p value")


def test_outside_cells_python_stops_as_it_did_before():
    before = sys.breakpointhook, pdb.set_trace, sys.gettrace()
    rank = FakeRank()
    with rank.breakpoints.served():
        assert sys.breakpointhook != before[0]
        rank.user_ns["__return__"] = rank.user_ns["__exception__"] = object()
    assert (sys.breakpointhook, pdb.set_trace, sys.gettrace()) == before
    assert rank.user_ns == {}


def test_a_hook_that_a_program_sets_is_left_alone(monkeypatch):
    called = []
    rank = FakeRank()
    monkeypatch.setattr(sys, "breakpointhook", lambda: called.append(1))
    with rank.breakpoints.served():
        breakpoint()
    assert called == [1]


def test_the_variable_that_switches_breakpoints_off_is_respected(monkeypatch):
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    rank = FakeRank()
    with rank.breakpoints.served():
        breakpoint()
    assert rank.published == []


def test_another_thread_is_passed_over(capsys):
    rank = FakeRank()
    with rank.breakpoints.served():
        thread = threading.Thread(target=breakpoint)
        thread.start()
        thread.join()
    assert rank.published == []
    assert "passed over" in capsys.readouterr().err
