"""Streaming output of N ranks: equal lines once, order kept, nothing lost, floods bounded."""

from __future__ import annotations

import random
import re
import time
import tracemalloc

import pytest

from ddl_magics.views.fold import Folder
from ddl_magics.views.rows import LONGEST, RowReader

pytestmark = pytest.mark.timeout(60)
LABEL = re.compile(r"^\[([\d,-]+)\](?: (.*))?$", re.DOTALL)


def text(pieces):
    return "".join(piece for _, piece in pieces)


def screen(pieces):
    r"""What a terminal or notebook shows in the end: `\r` goes back to the start of the row and is drawn over."""
    rows = []
    for line in text(pieces).split("\n"):
        row = ""
        for part in line.split("\r"):
            row = part + row[len(part) :]
        rows.append(row.rstrip())
    return rows


def expand(label):
    for part in label.split(","):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def by_rank(lines, ranks):
    """The lines that each rank is said to have printed, from the labels."""
    seen = {rank: [] for rank in ranks}
    for line in lines:
        match = LABEL.match(line)
        for rank in expand(match[1]):
            seen[rank].append(match[2] or "")
    return seen


def test_equal_lines_appear_once_with_their_ranks_and_others_under_their_own():
    folder = Folder(range(4))
    for rank in range(4):
        folder.feed(rank, "stdout", f"hello\n\n{{}}\n{'odd' if rank == 1 else 'even'}\nbye\n", 0.0)
    shown = folder.flush(0.1) + folder.flush(0.4)
    assert text(shown).split("\n") == ["[0-3] hello", "[0-3]", "[0-3] {}", "[0,2-3] even", "[1] odd", "[0-3] bye", ""]


def test_a_line_waits_a_moment_for_its_twins_and_no_longer():
    folder = Folder(range(2))
    folder.feed(0, "stdout", "x\n", 0.0)
    assert folder.flush(0.1) == []
    assert folder.flush(0.25) == [("stdout", "[0] x\n")]
    folder.feed(1, "stdout", "y\n", 1.0)
    folder.feed(0, "stdout", "y\n", 1.1)
    assert folder.flush(1.1) == [("stdout", "[0-1] y\n")]


def test_ranks_that_have_ended_are_not_waited_for():
    folder = Folder(range(2))
    folder.ended(1)
    folder.feed(0, "stdout", "x\n", 0.0)
    assert folder.flush(0.0) == [("stdout", "[0] x\n")]


def test_one_rank_needs_no_label_and_no_waiting():
    folder = Folder([2])
    folder.feed(2, "stdout", "a\n", 0.0)
    folder.feed(2, "stderr", "b\n", 0.0)
    folder.feed(5, "stdout", "of another cell\n", 0.0)
    assert folder.flush(0.0) == [("stdout", "a\n"), ("stderr", "b\n")]


def test_stdout_and_stderr_keep_their_order_and_do_not_mix():
    folder = Folder(range(2))
    for rank in range(2):
        folder.feed(rank, "stdout", "same\n", 0.0)
        folder.feed(rank, "stderr", "same\n", 0.0)
        folder.feed(rank, "stdout", "end\n", 0.0)
    assert folder.flush(0.0) == [("stdout", "[0-1] same\n"), ("stderr", "[0-1] same\n"), ("stdout", "[0-1] end\n")]


def test_modes_rank0_and_all():
    one, all_ = Folder(range(3), mode="rank0"), Folder(range(3), mode="all")
    for folder in (one, all_):
        for rank in range(3):
            folder.feed(rank, "stdout", "x\n", 0.0)
    assert one.flush(0.0) == [("stdout", "x\n")]
    assert all_.flush(0.0) == [("stdout", "[0] x\n[1] x\n[2] x\n")]


def test_a_row_without_newline_is_shown_after_a_grace_and_never_lost():
    folder = Folder(range(2))
    folder.feed(0, "stdout", "loading", 0.0)
    assert folder.flush(0.3) == []
    shown = folder.flush(0.6)
    assert text(shown) == "[0] loading"
    folder.feed(0, "stdout", " done\n", 1.0)
    shown += folder.flush(1.3)
    assert screen(shown) == ["[0] loading done", ""]
    folder.feed(1, "stdout", "cut off", 2.0)
    shown += folder.flush(2.0, final=True)
    assert screen(shown) == ["[0] loading done", "[1] cut off", ""]


def bar(percent, rate=3.1):
    return f"\r{percent:3d}%|{'█' * (percent // 10):<10}| {percent}/100 [00:0{percent // 20}<00:01, {rate}it/s]"


def test_progress_bars_of_all_ranks_are_one_row_that_is_redrawn():
    folder, shown = Folder(range(4)), []
    for percent in range(0, 101, 5):
        for rank in range(4):
            folder.feed(rank, "stderr", bar(percent, 3.0 + rank / 10), percent / 10)
        shown += folder.flush(percent / 10)
        assert len(screen(shown)) == 1
        assert screen(shown)[0].startswith(f"[0-3] {percent:3d}%")
    for rank in range(4):
        folder.feed(rank, "stderr", "\n", 11.0)
        folder.feed(rank, "stdout", "done\n", 11.0)
    shown += folder.flush(11.0, final=True)
    lines = screen(shown)
    assert len(lines) == 3
    assert lines[0].startswith("[0-3] 100%|██████████|")
    assert lines[1:] == ["[0-3] done", ""]


def test_the_slowest_bar_stands_for_its_group_and_other_bars_stand_beside_it():
    folder = Folder(range(3))
    folder.feed(0, "stderr", bar(50), 0.0)
    folder.feed(1, "stderr", bar(40), 0.0)
    folder.feed(2, "stderr", "\rdownload: 3/7", 0.0)
    row = screen(folder.flush(0.0))[0]
    assert row.startswith("[0-1]  40%")
    assert row.endswith("[2] download: 3/7")


def test_lines_that_come_while_a_bar_is_drawn_stay_above_it():
    folder = Folder([0])
    folder.feed(0, "stderr", bar(10), 0.0)
    shown = folder.flush(0.0)
    folder.feed(0, "stdout", "epoch 1\n", 0.3)
    shown += folder.flush(0.3)
    assert screen(shown) == ["epoch 1", bar(10)[1:].rstrip()]
    folder.feed(0, "stderr", bar(30), 0.6)
    shown += folder.flush(0.6)
    shown += folder.flush(0.9, final=True)
    assert screen(shown) == ["epoch 1", bar(30)[1:].rstrip(), ""]


def test_final_values_that_differ_are_not_taken_for_timing():
    folder = Folder(range(2))
    for rank in range(2):
        folder.feed(rank, "stderr", f"{bar(90)}{bar(100)} loss=2.{rank}\n", 0.0)
    assert len(text(folder.flush(0.0, final=True)).strip().split("\n")) == 2


def test_nothing_is_redrawn_where_nothing_can_be():
    folder, shown = Folder(range(2), live=False), []
    for percent in (0, 50, 100):
        for rank in range(2):
            folder.feed(rank, "stderr", bar(percent), percent / 10)
        shown += folder.flush(percent / 10)
    assert shown == []
    assert text(folder.flush(11, final=True)).count("\n") == 1


def test_rows_fit_the_width_of_a_terminal():
    folder = Folder([0], width=40)
    folder.feed(0, "stderr", "\r" + "x" * 100, 0.0)
    assert len(text(folder.flush(0.0))) == 39


def test_a_line_that_two_ranks_print_in_opposite_order_is_not_waited_for_forever():
    folder = Folder(range(2))
    folder.feed(0, "stdout", "a\nb\n", 0.0)
    folder.feed(1, "stdout", "b\na\n", 0.0)
    lines = screen(folder.flush(0.25))[:-1]
    assert by_rank(lines, range(2)) == {0: ["a", "b"], 1: ["b", "a"]}


def test_ansi_passes_and_does_not_colour_the_lines_of_others():
    folder = Folder(range(2))
    folder.feed(0, "stdout", "\x1b[31mred\nstill\x1b[0m\nplain\n", 0.0)
    lines = text(folder.flush(1.0)).split("\n")
    assert lines == ["[0] \x1b[31mred\x1b[0m", "[0] \x1b[31mstill\x1b[0m", "[0] plain", ""]


def test_rows_of_windows_and_nested_bars():
    reader = RowReader()
    assert reader.feed("a\r\nb\r") == ["a"]
    assert reader.feed("\nc") == ["b"]
    assert reader.feed("\rdd") == []
    assert (reader.open, reader.redrawn) == ("dd", True)
    assert reader.feed("\r      \r") == []
    assert (reader.open, reader.finish()) == ("", [])
    assert reader.feed("\router 10%\n\rinner 50%\x1b[A") == []
    assert reader.open == "outer 10%  inner 50%"
    assert reader.feed("\n\r         \r\x1b[A\router 20%") == []
    assert reader.open == "outer 20%"
    assert reader.feed("\n") == ["outer 20%"]


def test_endless_lines_are_bounded_and_say_how_much_is_missing():
    reader = RowReader()
    for _ in range(100):
        assert reader.feed("x" * 1000) == []
    assert len(reader.open) == LONGEST
    (line,) = reader.feed("\n")
    assert line == "x" * LONGEST + "... 80,000 characters folded: %ddl log shows all"
    assert reader.feed("a\n" + "y" * (LONGEST + 5) + "\nb\n")[1].endswith("... 5 characters folded: %ddl log shows all")


@pytest.mark.parametrize("same", [True, False])
def test_a_flood_shows_head_and_tail_cheaply_and_in_bounded_memory(same):
    ranks, lines, chunk = 4, 100_000, 500
    chunks = [
        ["".join(f"line {i}{'' if same else f' of {r}'}\n" for i in range(at, at + chunk)) for r in range(ranks)]
        for at in range(0, lines, chunk)
    ]
    folder, shown, now = Folder(range(ranks)), [], 0.0
    began = time.process_time()
    for number, texts in enumerate(chunks):
        for rank in range(ranks):
            folder.feed(rank, "stdout", texts[rank], now)
        now += 0.02
        if number % 3 == 0:
            shown += folder.flush(now)
    shown += folder.flush(now, final=True)
    assert time.process_time() - began < 1.5
    out = screen(shown)
    assert len(out) < 3000
    assert sum("folded: %ddl log shows all" in line for line in out) == 1
    assert len(text(shown)) < 0.1 * sum(len(t) for texts in chunks for t in texts)
    if same:
        assert out[0] == "[0-3] line 0"
        assert out[-2] == "[0-3] line 99999"
        (marker,) = [line for line in out if "folded" in line]
        number = int(re.search(r"([\d,]+) lines", marker)[1].replace(",", ""))
        assert number == lines - (len(out) - 2)


def test_the_memory_of_a_flood_is_bounded():
    folder = Folder(range(4))
    tracemalloc.start()
    for i in range(40):
        for rank in range(4):
            folder.feed(rank, "stdout", f"{i} {rank} {'x' * 90}\n" * 1000, i * 0.01)
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert current < 3_000_000


def test_a_flood_that_ends_gives_way_to_what_comes_after_it():
    folder, shown = Folder([0]), []
    folder.feed(0, "stdout", "".join(f"{i}\n" for i in range(5000)), 0.0)
    shown += folder.flush(0.0)
    shown += folder.flush(2.0)
    folder.feed(0, "stdout", "calm again\n", 60.0)
    shown += folder.flush(60.0)
    out = screen(shown)
    assert out[-2] == "calm again"
    assert out[800] == "... 4,000 lines folded: %ddl log shows all ..."
    assert out[801] == "4800"


def test_a_program_that_prints_for_hours_does_not_fill_the_notebook():
    folder, shown = Folder([0]), []
    for second in range(3 * 3600):
        folder.feed(0, "stdout", f"step {second}\n" * 10, float(second))
        shown += folder.flush(float(second))
    shown += folder.flush(3 * 3600.0, final=True)
    assert len(screen(shown)) < 25_000
    assert screen(shown)[-2] == "step 10799"


def random_output(chance, ranks):
    """What each rank prints, and the same cut into pieces in some order of arrival."""
    words = ["a", "b", "", "{}", "  indented", "a b [1] c", "é" * 3]
    common = [chance.choice(words) for _ in range(chance.randrange(30))]
    lines = {}
    for rank in range(ranks):
        lines[rank] = [w for w in common if chance.random() < 0.9]
        for _ in range(chance.randrange(4)):
            lines[rank].insert(chance.randrange(len(lines[rank]) + 1), f"own {rank} {chance.randrange(3)}")
    streams = {rank: "".join(f"{line}\n" for line in lines[rank]) for rank in lines}
    pieces, at = [], dict.fromkeys(streams, 0)
    while any(at[r] < len(streams[r]) for r in streams):
        rank = chance.choice([r for r in streams if at[r] < len(streams[r])])
        size = chance.randrange(1, 25)
        pieces.append((rank, streams[rank][at[rank] : at[rank] + size]))
        at[rank] += size
    return lines, pieces


@pytest.mark.parametrize("seed", range(150))
def test_property_nothing_is_lost_and_the_order_of_each_rank_is_kept(seed):
    chance = random.Random(seed)
    ranks = chance.choice([2, 3, 5, 9])
    lines, pieces = random_output(chance, ranks)
    folder, shown, now = Folder(range(ranks), mode=chance.choice(["fold", "fold", "all"])), [], 0.0
    for rank, piece in pieces:
        folder.feed(rank, "stdout", piece, now)
        now += chance.random() * 0.2
        if chance.random() < 0.5:
            shown += folder.flush(now)
    shown += folder.flush(now, final=True)
    *out, last = screen(shown)
    assert last == ""
    assert by_rank(out, range(ranks)) == {r: [line.rstrip() for line in lines[r]] for r in lines}


@pytest.mark.parametrize("seed", range(30))
def test_property_the_row_does_not_depend_on_how_the_text_is_cut(seed):
    chance = random.Random(seed)
    alphabet = ["a", "bc", "\n", "\r", "\r\n", "\x1b[31m", "\x1b[0m", " "]
    whole = "".join(chance.choice(alphabet) for _ in range(60))
    one, many = RowReader(), RowReader()
    expected = one.feed(whole) + one.finish()
    got, at = [], 0
    while at < len(whole):
        size = chance.randrange(1, 9)
        got += many.feed(whole[at : at + size])
        at += size
    assert got + many.finish() == expected
