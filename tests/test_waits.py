"""Who waits for whom, of what ranks say: every situation that can be told, and that nobody is freed who may go on."""

from __future__ import annotations

import pytest

from ddl_magics.protocol import Waiting
from ddl_magics.views.holdups import calls, sentence, sentences
from ddl_magics.waits import PATIENCE_S, holdups, parties, stuck

pytestmark = pytest.mark.timeout(60)
SLEEP = "time.sleep(60)"


def waits(name="all_reduce", group=(0, 1), line=12, number=5, seconds=34.0, shapes=((4,),), dtype="Float", **more):
    """A rank in a collective, as it answers over the wire."""
    waiting = Waiting(name, seconds, tuple(group), more.pop("group_name", "0"), number, shapes, dtype, **more)
    return {"state": "waiting", "seconds": 0.1, "line": line, "source": "x", "waiting": waiting.to_wire()}


def runs(line=9, source=SLEEP, state="running"):
    return {"state": state, "seconds": 40.0, "line": line, "source": source, "waiting": None}


def said(answers, ended=(), world=None):
    return sentences(holdups(answers, ended), world or len(answers))


def test_ranks_that_wait_name_the_rank_that_does_not_come_and_where_it_is():
    everybody = range(8)
    answers = {rank: waits(group=everybody) for rank in everybody} | {1: runs()}
    assert said(answers) == [
        "ranks 0,2-7 wait 34 s in all_reduce (cell line 12) for rank 1, which is in time.sleep (line 9)"
    ]
    (holdup,) = holdups(answers)
    assert holdup.ripe
    assert not holdups({0: waits(seconds=PATIENCE_S - 1), 1: runs()})[0].ripe


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (runs(9, "for x in data:"), "rank 1, which is at line 9"),
        (runs(None, ""), "rank 1, which runs"),
        (runs(7, state="stopped"), "rank 1, which is stopped at a breakpoint (line 7)"),
        ({"state": "dead"}, "rank 1, which is dead"),
        ({"state": "idle"}, "rank 1, which runs no cell"),
        ({"state": "outside"}, "rank 1, which is not in this cell"),
        (runs(7, state="released") | {"waiting": waits()["waiting"]}, "rank 1, which is released"),
    ],
)
def test_a_missing_rank_may_be_anywhere(answer, words):
    assert said({0: waits(), 1: answer}) == [f"rank 0 waits 34 s in all_reduce (cell line 12) for {words}"]


def test_a_rank_that_has_ended_the_cell_or_does_not_answer_is_named_so():
    assert said({0: waits(), 1: {"state": "idle"}}, ended={1})[0].endswith("for rank 1, which has ended the cell")
    assert said({0: waits()}, world=2)[0].endswith("for rank 1, which does not answer")
    answers = {0: waits(group=range(4))} | {rank: {"state": "idle"} for rank in (1, 2, 3)}
    assert said(answers, ended={1, 2, 3})[0].endswith("for ranks 1-3, which have ended the cell")


def test_missing_ranks_at_different_places_are_each_told_and_many_are_counted():
    everybody = range(16)
    answers = {rank: waits(group=everybody) for rank in everybody} | {1: runs(9), 3: runs(14, "y = f(x)")}
    assert said(answers)[0].endswith("for rank 1, which is in time.sleep (line 9) and rank 3, which is in f (line 14)")
    answers |= {rank: runs(rank) for rank in range(4, 16)}
    assert said(answers)[0].endswith("rank 4, which is in time.sleep (line 4) and 10 more ranks")


def test_ranks_that_are_all_in_one_collective_are_at_work():
    assert holdups({0: waits(line=3), 1: waits(line=8)}) == []
    assert stuck({0: waits(), 1: waits()}) == set()


def test_lines_may_differ_in_one_collective():
    answers = {0: waits(group=range(3), line=3), 1: waits(group=range(3), line=8), 2: runs()}
    assert said(answers)[0].startswith("ranks 0-1 wait 34 s in all_reduce (cell lines 3,8) for rank 2")


def test_a_call_of_the_context_and_a_group_of_some_ranks_are_named():
    answers = {0: waits("barrier", call="ddl.barrier"), 1: runs()}
    assert "in ddl.barrier (cell line 12)" in said(answers)[0]
    answers = {0: waits("broadcast", call="ddl.save"), 1: runs()}
    assert "in ddl.save (broadcast) (cell line 12)" in said(answers)[0]
    answers = {0: waits(group=(0, 2), group_name="7"), 1: runs(), 2: runs(), 3: runs()}
    assert "in all_reduce of ranks 0,2 (cell line 12) for rank 2, which" in said(answers)[0]


def test_different_collectives_at_one_place_of_the_sequence_never_meet():
    answers = {0: waits(line=3), 1: waits("broadcast", line=5, seconds=20)}
    assert said(answers) == [
        "rank 0 is in all_reduce (line 3), rank 1 in broadcast (line 5), for 20 s: they never meet"
    ]
    assert stuck(answers) == {0, 1}


def test_a_mismatch_is_told_also_while_others_are_elsewhere():
    answers = {rank: waits(group=range(4)) for rank in range(4)} | {1: waits("broadcast", group=range(4)), 3: runs()}
    assert said(answers)[0].startswith(
        "ranks 0,2 are in all_reduce (line 12), rank 1 in broadcast (line 12), for 34 s:"
    )
    assert len(said(answers)) == 1
    assert stuck(answers) == set()


def test_different_tensors_in_one_collective_are_told():
    answers = {0: waits(line=3), 1: waits(line=3, shapes=((5, 2),))}
    (told,) = said(answers)
    assert told.startswith(
        "rank 0 is in all_reduce with [4] Float (line 3), rank 1 in all_reduce with [5, 2] Float (line 3)"
    )
    assert told.endswith("for 34 s: they never meet, their tensors differ")
    answers = {0: waits(), 1: waits(dtype="Half")}
    assert "rank 1 in all_reduce with [4] Half" in said(answers)[0]
    assert holdups({0: waits("gather"), 1: waits("gather", shapes=((5,),))}) == []


def test_ranks_out_of_step_are_told_when_everybody_waits():
    answers = {0: waits(number=6, line=6), 1: waits(number=5, line=4)}
    (told,) = said(answers)
    assert told.startswith(
        "rank 0 is in all_reduce, number 6 of its group (line 6), rank 1 in all_reduce, number 5 of its"
    )
    assert told.endswith("for 34 s: they are out of step and never meet")
    assert stuck(answers) == {0, 1}


def test_a_rank_ahead_is_right_while_the_one_behind_waits_for_another():
    three = range(3)
    answers = {0: waits(group=three, number=6), 1: runs(), 2: waits("broadcast", group=three, number=5)}
    assert said(answers) == [
        "ranks 0,2 wait 34 s in all_reduce and broadcast (cell line 12) for rank 1, which is in time.sleep (line 9)"
    ]
    assert stuck(answers) == set()


def test_a_cycle_over_groups_is_told_and_all_in_it_and_behind_it_are_stuck():
    answers = {
        0: waits(group=(0, 1), group_name="a", line=3),
        1: waits(group=(1, 2), group_name="b", line=4),
        2: waits(group=(0, 2), group_name="c", line=5),
        3: waits(group=(0, 1, 2, 3), group_name="0", number=9, line=6),
    }
    first, *rest = said(answers)
    assert first == (
        "rank 0 is in all_reduce of ranks 0-1 (line 3), rank 1 in all_reduce of ranks 1-2 (line 4), "
        "rank 2 in all_reduce of ranks 0,2 (line 5), for 34 s: they wait for one another"
    )
    assert len(rest) == 1
    assert rest[0].startswith("rank 3 waits 34 s in all_reduce (cell line 6) for rank 0, which waits in all_reduce of")
    assert stuck(answers) == {0, 1, 2, 3}


def test_the_cause_comes_before_those_who_wait_behind_it():
    answers = {
        0: waits(group=(0, 1), group_name="a", seconds=50),
        1: waits(group=(1, 2), group_name="b", seconds=20),
        2: runs(),
    }
    first, second = said(answers)
    assert first.startswith("rank 1 waits 20 s")
    assert "for rank 2, which is in time.sleep" in first
    assert "for rank 1, which waits in all_reduce of ranks 1-2" in second
    assert stuck(answers) == set()
    assert stuck(answers | {2: {"state": "dead"}}) == {0, 1}


def test_only_who_waits_for_nobody_who_can_come_is_stuck():
    four = range(4)
    answers = {0: waits(group=four), 1: waits(group=four)}
    assert stuck(answers | {2: runs(), 3: runs()}) == set()
    assert stuck(answers | {3: runs()}, ended={2}) == set()
    assert stuck(answers | {2: {"state": "idle"}, 3: {"state": "idle"}}) == set()
    assert stuck(answers, ended={2}) == set()
    assert stuck(answers, ended={2, 3}) == {0, 1}
    assert stuck(answers | {2: {"state": "outside"}}, ended={3}) == {0, 1}


def test_messages_wait_for_their_other_end():
    pair = {"number": 0, "shapes": (), "dtype": ""}
    there = {0: waits("send", **pair), 1: waits("recv", **pair)}
    assert holdups(there) == []
    answers = {0: waits("recv", **pair), 1: waits("recv", **pair)}
    assert [holdup.kind for holdup in holdups(answers)] == ["cycle"]
    assert stuck(answers) == {0, 1}


def test_messages_whose_other_end_is_unknown_are_stuck_only_when_nobody_can_send():
    unknown = {"group": (), "number": 0, "shapes": (), "dtype": "", "group_name": ""}
    answers = {rank: waits("recv", line=3, **unknown) for rank in range(8)}
    assert stuck(answers) == set(range(8))
    assert said(answers) == ["ranks 0-7 are in recv (line 3), for 34 s: they wait for one another"]
    assert said(answers | {4: runs()})[0].startswith("ranks 0-3,5-7 wait 34 s in recv (cell line 3) for rank 4, which")
    assert stuck(answers | {4: runs()}) == set()
    assert stuck(answers | {4: {"state": "idle"}}, ended={4}) == set(range(8)) - {4}
    assert stuck(answers | {4: waits("isend", **unknown)}) == set()
    assert holdups({0: waits("recv", **unknown), 1: waits("send", **unknown)}) == []


def test_the_making_of_a_group_waits_for_everybody():
    unknown = {"group": (), "number": 0, "shapes": (), "dtype": "", "group_name": ""}
    answers = {0: waits("new_group", **unknown), 1: waits("all_reduce")}
    assert stuck(answers) == {0, 1}
    assert "they wait for one another" in said(answers)[0]
    assert "for rank 1, which is in time.sleep" in said({0: waits("new_group", **unknown), 1: runs()})[0]


def test_a_situation_of_the_next_step_is_the_same_one():
    before, after = ({0: waits(number=n, seconds=s), 1: runs(line)} for n, s, line in ((5, 12, 9), (6, 20, 10)))
    assert holdups(before)[0].key == holdups(after)[0].key
    assert holdups(before)[0].key != holdups({0: runs(), 1: waits()})[0].key


def test_ranks_are_parties_by_what_they_do():
    answers = {0: waits(), 1: runs(), 2: waits(seconds=50.0), 3: runs(8), 4: {"state": "idle"}, 5: {"state": "idle"}}
    found = parties(answers, ended={5})
    assert [(p.ranks, p.state, p.line) for p in found] == [
        ((0, 2), "waiting", 12),
        ((1,), "running", 9),
        ((3,), "running", 8),
        ((4,), "idle", None),
        ((5,), "ended", None),
    ]
    assert found[0].seconds == 50.0


@pytest.mark.parametrize("ranks", [2, 4, 8, 512])
def test_any_number_of_ranks_is_a_few_short_sentences(ranks):
    everybody = range(ranks)
    kinds = [
        {rank: waits(group=everybody) for rank in everybody} | {ranks // 2: runs()},
        {rank: waits(group=everybody, line=rank, number=rank) for rank in everybody},
        {rank: waits("recv", group=(), number=0, line=rank) for rank in everybody},
        {rank: waits(group=(rank, (rank + 1) % ranks), group_name=str(rank)) for rank in everybody},
        {rank: waits(group=everybody) if rank % 2 else runs(rank) for rank in everybody},
        {rank: waits(group=everybody, line=rank, number=rank + 1) for rank in everybody} | {0: runs()},
    ]
    for answers in kinds:
        sentences_ = said(answers)
        assert 1 <= len(sentences_) <= 4
        assert all(len(text) < 1500 for text in sentences_)
    (first,) = said(kinds[0])
    rest = {2: "rank 0 waits", 4: "ranks 0-1,3 wait", 8: "ranks 0-3,5-7 wait", 512: "ranks 0-255,257-511 wait"}
    assert first.startswith(rest[ranks])


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("time.sleep(60)", "time.sleep"),
        ("loss = model(x)", "model"),
        ("x += f(1)", "f"),
        ("if rank == 1: time.sleep(60)", "time.sleep"),
        ("while not ready():", "ready"),
        ("return f(x)", "f"),
        ("for x in range(3):", ""),
        ("with open(path):", ""),
        ("elif f():", ""),
        ("f(g(x))", ""),
        ("x = [1](2)", ""),
        ("get()()", ""),
        ("while True: pass", ""),
        ("f(", ""),
        ("\x00", ""),
        ("", ""),
    ],
)
def test_a_line_is_named_by_its_call_where_it_has_just_one(source, name):
    assert calls(source) == name


def test_a_moment_is_not_counted():
    assert sentence(holdups({0: waits(seconds=0.4), 1: runs()})[0], 2).startswith("rank 0 waits in all_reduce")
