"""Tab and `name?` in a `%%ddl` cell come from rank 0, in time, and leave the kernel's own as they were."""

from __future__ import annotations

import pytest

from tests.notebook import HOLD, wait_for

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]

DEFINE = """%%ddl
import torch
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
batch = {"inputs": 1, "labels": 2}
def helper(alpha, beta):
    "Helps on ranks."
    return alpha
"""


@pytest.fixture(scope="module", autouse=True)
def _names(ranks2):
    ranks2.run(DEFINE)
    ranks2.run("kernel_name = 1\nkernel_other = 2")


def complete(book, code, cursor=None):
    """Matches, and what of the code they replace."""
    reply = book.client.complete(code, cursor, reply=True, timeout=20)["content"]
    assert reply["status"] == "ok"
    return reply["matches"], code[reply["cursor_start"] : reply["cursor_end"]]


def inspect(book, code):
    """Text of the help on what the code ends with; None where there is none."""
    reply = book.client.inspect(code, reply=True, timeout=20)["content"]
    assert reply["status"] == "ok"
    return reply["data"]["text/plain"] if reply["found"] else None


def answered(ask, timeout=20):
    """What rank 0 says. It is silent where it has not answered in a quarter of a second, and is asked again."""
    replies = []

    def told():
        replies.append(ask())
        return replies[-1] not in (None, []) and (not isinstance(replies[-1], tuple) or replies[-1][0])

    wait_for(told, timeout, "an answer of rank 0")
    return replies[-1]


@pytest.mark.parametrize(
    ("code", "expected", "replaced"),
    [
        ("%%ddl\nmod", "model", "mod"),
        ("\n%%ddl\nmod", "model", "mod"),
        ("%%ddl --strategy ddp\nfor x in y:\n    hel", "helper", "hel"),
        ("%%ddl\nmodel[0].wei", "weight", "wei"),
        ("%%ddl\nprint(model.state_d", "state_dict", "state_d"),
        ("%%ddl\nmodel[0].weight.nu", "numel", "nu"),
        ("%%ddl\nbatch['in", "inputs", "in"),
        ("%%ddl\nhelper(al", "alpha=", "al"),
        ("%%ddl\ntorch.all_re", None, "all_re"),
        ("%%ddl\ntorch.distributed.all_red", "all_reduce", "all_red"),
        ("%%ddl\nddl.back", "backward", "back"),
        ("%%ddl\n%timei", "%timeit", "%timei"),
        ("%%ddl\nnew_thing = 1\ndef f(argument):\n    new_", "new_thing", "new_"),
        ("%%ddl\ndef f(argument):\n    arg", "argument", "arg"),
        ("%%ddl\nkernel_na", None, "kernel_na"),
    ],
)
def test_completions_in_a_cell_are_of_rank_0(ranks2, code, expected, replaced):
    if expected is None:
        answered(lambda: complete(ranks2, "%%ddl\nmod"))  # it has time to answer
        assert complete(ranks2, code)[0] == []
    else:
        matches, span = answered(lambda: complete(ranks2, code))
        assert expected in matches
        assert span == replaced


def test_the_cursor_may_stand_in_the_middle(ranks2):
    code = "%%ddl\nmode\nprint(3)"
    assert answered(lambda: complete(ranks2, code, len("%%ddl\nmode"))) == (["model"], "mode")


def test_other_cells_complete_as_before(ranks2):
    assert complete(ranks2, "kernel_na") == (["kernel_name"], "kernel_na")
    assert complete(ranks2, "%%time\nkernel_na") == (["kernel_name"], "kernel_na")
    assert "model" not in complete(ranks2, "mod")[0]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("%ddl st", ["start", "status", "stop", "strategy"]),
        ("x = 1\n%ddl start --n", ["--nnodes", "--nproc-per-node"]),
        ("%ddl start --launcher m", ["mpi"]),
        ("%%ddl --prec", ["--precision"]),
        ("%%ddl --precision bf16-", ["bf16-mixed", "bf16-true"]),
        ("%%ddl --strategy ddp,zero:", ["zero:1", "zero:2", "zero:3"]),
        ("%ddl strategy axo", ["axonn"]),
        ("%ddl help pu", ["pull", "push"]),
        ("%ddl check helpe", ["helper"]),
        ("%ddl check model.state_d", ["model.state_dict"]),
        ("%ddl push kernel_o", ["kernel_other"]),
        ("%ddl nonsense x", []),
    ],
)
def test_verbs_options_and_values_complete(ranks2, code, expected):
    matches = (answered(lambda: complete(ranks2, code)) if expected else complete(ranks2, code))[0]
    assert [match for match in matches if not match.endswith("_")] == expected


def test_help_in_a_cell_is_of_rank_0(ranks2):
    assert "Helps on ranks." in answered(lambda: inspect(ranks2, "%%ddl\nhelper"))
    assert "helper(alpha, beta)" in answered(lambda: inspect(ranks2, "%%ddl\nhelper(1"))
    assert inspect(ranks2, "%%ddl\nkernel_name") is None
    assert "int" in inspect(ranks2, "kernel_name")
    assert "a cell that begins with `%%ddl` runs on every rank" in inspect(ranks2, "%%ddl")


def test_a_question_mark_shows_help_under_the_cell_once(ranks2):
    shown = ranks2.run("%%ddl\nhelper?")
    assert shown.text.count("Helps on ranks.") == 1
    assert "[0]" in shown.text
    assert "return alpha" in ranks2.run("%%ddl --ranks 1\nhelper??").text
    assert "helper" in ranks2.run("%%ddl\nhelp*?").text


def test_asking_changes_nothing_in_the_kernel_nor_on_the_ranks(ranks2):
    state = "(sorted(n for n in globals() if not n.startswith('_i')), len(In), sorted(Out), _, __)"
    names = "%%ddl\nprint(*sorted(n for n in globals() if not n.startswith('_i')), Out)"
    ranks2.value("'its own variable is there from now on'")
    kernel, rank = ranks2.value(state), ranks2.run(names).stdout
    for code in ("%%ddl\nmod", "%%ddl\nmodel[0].", "%ddl check mod"):
        complete(ranks2, code)
    inspect(ranks2, "%%ddl\nhelper")
    after = ranks2.value(state)
    assert after == (kernel[0], kernel[1] + 2, *kernel[2:])
    assert of_ranks(ranks2.run(names).stdout) == of_ranks(rank)


def test_a_busy_rank_is_silent_in_time(ranks2, tmp_path):
    ranks2.run("%%ddl --bg\n" + HOLD.format(path=str(tmp_path / "go")))
    assert complete(ranks2, "%%ddl\nmod")[0] == []
    assert inspect(ranks2, "%%ddl\nhelper") is None
    assert complete(ranks2, "%ddl check mod")[0] == []
    assert ranks2.run("%%ddl\n1").ename == "BusyError"  # nobody waited for the cell
    assert complete(ranks2, "kernel_na")[0] == ["kernel_name"]
    (tmp_path / "go").touch()
    ranks2.run("%ddl wait")
    assert answered(lambda: complete(ranks2, "%%ddl\nmod"))[0] == ["model"]


def test_a_rank_that_takes_too_long_is_not_waited_for(ranks2, tmp_path):
    looks = HOLD.format(path=str(tmp_path / "go")).replace("\n", "\n        ")
    ranks2.run(f"%%ddl\nclass Slow:\n    def __dir__(self):\n        {looks}\n        return ['late']\nslow = Slow()")
    answered(lambda: complete(ranks2, "%%ddl\nmod"))
    assert complete(ranks2, "%%ddl\nslow.la")[0] == []
    assert complete(ranks2, "%%ddl\nmod")[0] == []  # it still looks
    (tmp_path / "go").touch()
    assert ranks2.run("%%ddl\n1").ename is None
    assert answered(lambda: complete(ranks2, "%%ddl\nmod"))[0] == ["model"]


def test_without_ranks_a_cell_has_no_completions_and_unloading_restores_all(notebook):
    notebook.run("kernel_name = 1")
    assert complete(notebook, "%%ddl\nkernel_na")[0] == []
    assert inspect(notebook, "%%ddl\nkernel_name") is None
    assert complete(notebook, "%ddl sta")[0] == ["start", "status"]
    notebook.run("%unload_ext ddl_magics")
    assert complete(notebook, "%%ddl\nkernel_na")[0] == ["kernel_name"]
    assert "int" in inspect(notebook, "%%ddl\nkernel_name")
    owners = "[(get_ipython().Completer, 'completions'), (get_ipython().kernel, 'do_inspect')]"
    places = f"[name in vars(owner) for owner, name in {owners}]"
    assert notebook.value(places) == [False, False]
    assert notebook.run("%load_ext ddl_magics").ename is None
    assert complete(notebook, "%%ddl\nkernel_na")[0] == []


def of_ranks(shown: str) -> set[str]:
    """The lines of the ranks without their numbers: on a busy machine equal lines may come too late to be one."""
    return {line.partition("] ")[2] for line in shown.splitlines()}
