"""The comparison of runs and the status of ranks as tables."""

from __future__ import annotations

import dataclasses
import io

import pytest

from ddl_magics.protocol import Outcome
from ddl_magics.telemetry.history import History, RunInfo
from ddl_magics.telemetry.runs import Runs
from ddl_magics.views.screen import TerminalScreen
from ddl_magics.views.status import StatusRow, status_html, status_lines
from ddl_magics.views.table import runs_bundle, show_runs, show_status
from ddl_magics.views.text import plain
from tests.views.simulated import GIB, failed, history
from tests.views.test_picture import EVIL, parse, pictures, widths, words


@pytest.fixture
def rows():
    runs = Runs()
    for strategy, share in [("ddp", (1, 1, 2, 1, 0)), ("zero:3", (0.5, 0.5, 1, 1, 0))]:
        ended = [Outcome(r, "ok") for r in range(2)] if strategy == "ddp" else failed(2)
        runs.add(history(2, 60, 60, run_id=strategy, name=strategy, strategy=strategy, share=share, finish=ended))
    return runs.rows()


def test_runs_are_compared_in_losses_memory_rate_and_ratios(rows):
    bundle = runs_bundle(rows)
    for text in (words(bundle["text/html"]), " ".join(bundle["text/plain"].split())):
        for part in (
            "first loss",
            "last loss",
            "tokens/s",
            "of ddp",
            "speed-up",
            "6.20 k",
            "0.60",
            "failed",
            "3.923",
            "5.60 1.12 1.12 2.24 1.12",
        ):
            assert part in text
    bars = [widths(p) for p in pictures(bundle["text/html"])]
    assert sum(bars[0].values()) == pytest.approx(1000, abs=0.1)
    assert sum(bars[1].values()) == pytest.approx(600, abs=0.1)
    assert bars[0]["optimizer"] == pytest.approx(2 * bars[0]["parameters"], abs=0.1)


def test_runs_of_one_strategy_are_told_apart_by_name(rows):
    runs = Runs()
    for name in ("a", "b"):
        runs.add(history(1, 20, 20, run_id=name, name=name, finish=[Outcome(0, "ok")]))
    text = runs_bundle(runs.rows())["text/plain"]
    assert "zero:3 a" in text
    assert "zero:3 b" in text


def test_runs_without_a_loss_are_compared_by_what_they_tell(rows):
    rated = [dataclasses.replace(row, metric="tokens/s") for row in rows]
    text = runs_bundle(rated)["text/plain"]
    assert "last tokens/s" in text
    assert "loss" not in text
    mixed = runs_bundle([rows[0], rated[1]])["text/plain"].splitlines()
    assert "last loss" in mixed[0]
    assert "3.923" in mixed[1]
    assert "3.923" not in mixed[2]


def test_runs_that_tell_nothing_and_no_runs_are_tables_too():
    runs = Runs()
    runs.add(History(RunInfo("r", EVIL, EVIL, 1), []))
    html = runs_bundle(runs.rows())["text/html"].replace("\x1b", "")
    assert "–" in words(html)
    assert parse(html).findall(".//script") == []
    assert "No run has ended yet" in runs_bundle([])["text/plain"]


def facts(rank, **kwargs):
    return {"rank": rank, "host": "n1", "pid": 40 + rank, "device": f"cuda:{rank}", **kwargs}


def status_rows():
    memory = {"total": 26 * GIB, "capacity": 40 * GIB}
    return [
        StatusRow.of(
            facts(0), {"state": "running", "seconds": 11.2, "line": 9, "source": " loss.backward() ", "memory": memory}
        ),
        StatusRow.of(facts(1), {"state": "idle", "seconds": 0.1, "line": 9, "source": "old", "memory": memory}),
        StatusRow.of(facts(2, host=EVIL), {"state": "no answer"}),
    ]


def test_status_tells_where_every_rank_is():
    html = status_html(status_rows()).replace("\x1b", "")
    text = plain(status_lines(status_rows()))
    first = "0 n1 40 cuda:0 26.0 GiB of 40.0 GiB running 11 s 9: loss.backward()"
    assert first in words(html)
    assert first in " ".join(text.split())
    assert "idle" in text
    assert "old" not in text
    assert "no answer" in text
    assert parse(html).findall(".//script") == []


def test_a_terminal_gets_colours_and_a_file_plain_text(rows):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    terminal, file = Terminal(), io.StringIO()
    show_runs(rows, TerminalScreen(terminal, terminal))
    show_status(status_rows(), TerminalScreen(file, file))
    assert "38;2;" in terminal.getvalue()
    assert "loss.backward()" in file.getvalue()
    assert "\x1b[1m" not in file.getvalue()
