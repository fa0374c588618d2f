"""The debugger's prompt: which ranks a line is for, and how their answers are shown."""

from __future__ import annotations

import builtins

import pytest
from IPython.core.error import StdinNotImplementedError

from ddl_magics.errors import DebugError
from ddl_magics.prompt import Prompt, labelled


@pytest.mark.parametrize(
    ("line", "chosen"),
    [("rank 1", (1,)), ("rank all", (0, 1, 2, 3)), ("ranks 0,2-3", (0, 2, 3)), ("rank 0, 3", (0, 3))],
)
def test_a_line_can_choose_the_ranks_that_are_asked(line, chosen):
    prompt = Prompt([1])
    assert prompt.choose(line, range(4)) == ""
    assert prompt.chosen == chosen


@pytest.mark.parametrize("line", ["rank", "rank - 1", "rank == 0", "p rank", "ranks[0]", "next"])
def test_other_lines_are_for_the_ranks_also_about_the_variable_rank(line):
    assert Prompt([1]).choose(line, range(4)) is None


def test_a_rank_that_cannot_be_asked_is_said_and_nothing_changes():
    prompt = Prompt([1])
    assert prompt.choose("rank 2", [0, 1]) == "rank 2 cannot be asked, only ranks 0-1\n"
    assert prompt.chosen == (1,)


@pytest.fixture
def typed(monkeypatch):
    """Lines that the user types, and the prompts that they see."""
    lines, prompts = [], []

    def answer(prompt):
        prompts.append(prompt)
        line = lines.pop(0)
        if isinstance(line, type):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", answer)
    return lines, prompts


def test_the_prompt_names_the_ranks_and_an_empty_line_repeats_the_last(typed):
    lines, prompts = typed
    lines += ["next", "", "  p x "]
    prompt = Prompt([0])
    assert [prompt.ask(), prompt.ask()] == ["next", "next"]
    prompt.chosen = (0, 2, 3)
    assert prompt.ask() == "p x"
    assert prompts == ["ddl rank 0> ", "ddl rank 0> ", "ddl ranks 0,2-3> "]


@pytest.mark.parametrize("line", ["q", "quit", "exit", EOFError])
def test_the_user_can_leave(typed, line):
    typed[0].append(line)
    assert Prompt([0]).ask() is None


def test_a_front_end_without_input_is_one_line(typed):
    typed[0].append(StdinNotImplementedError)
    with pytest.raises(DebugError, match="cannot ask for input"):
        Prompt([0]).ask()


def test_equal_answers_are_shown_once():
    assert labelled({1: "5\n"}) == "5\n"
    assert labelled({0: "a\nb\n", 1: "c\n", 2: "a\nb\n"}) == "[0,2] a\n[0,2] b\n[1] c\n"
    assert labelled({0: "", 1: ""}) == ""
    assert labelled({}) == ""
