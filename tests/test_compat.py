"""What must work under every supported ipykernel; `make compat` runs this file under each, and under 7.0.

Everything goes through a real kernel and what its front end sees.
"""

from __future__ import annotations

from importlib.metadata import version

import pytest

from tests.notebook import Notebook, wait_for

REFUSED = version("ipykernel").startswith("7.0.")

works = [
    pytest.mark.mpi,
    pytest.mark.timeout(120),
    pytest.mark.skipif(REFUSED, reason="ipykernel 7.0 is refused"),
]


@pytest.mark.skipif(not REFUSED, reason="needs ipykernel 7.0")
def test_ipykernel_7_0_is_refused_in_one_line() -> None:
    book = Notebook(load=False)
    shown = book.run("%load_ext ddl_magics")
    book.close()
    assert shown.ename == "StartError"
    assert "ipykernel 7.0" in shown.evalue
    assert len(shown.traceback.strip().splitlines()) == 1


@pytest.fixture(scope="module")
def book(ranks2):
    return ranks2


class TestWorks:
    """One notebook with two ranks."""

    pytestmark = works

    def test_output_of_every_rank_is_shown(self, book) -> None:
        shown = book.run("%%ddl\nimport sys\nprint('alike')\nprint('mine', rank)\nprint('error', file=sys.stderr)")
        assert shown.ename is None, shown.text
        assert shown.stdout.count("alike") == 1
        assert "mine 0" in shown.stdout
        assert "mine 1" in shown.stdout
        assert "error" in shown.stderr

    def test_the_result_of_the_last_expression_is_shown(self, book) -> None:
        shown = book.run("%%ddl -o results\n{'sum': rank + 1}")
        assert "'sum': 2" in shown.text
        assert book.value("results") == [{"sum": 1}, {"sum": 2}]

    def test_a_failing_rank_fails_the_cell_and_the_next_one_runs(self, book) -> None:
        shown = book.run("%%ddl\nif rank == 1:\n    raise ValueError('the cause')")
        assert shown.ename == "CellError"
        assert "the cause" in shown.text
        assert "fine" in book.run("%%ddl\nprint('fine')").stdout

    def test_output_streams_while_the_cell_runs(self, book) -> None:
        cell = book.send(
            "%%ddl\nimport time\nprint('early', flush=True)\nwhile not globals().get('go'): time.sleep(0.01)"
        )
        seen = book.result(cell, until=lambda shown: "early" in shown.stdout)
        assert "early" in seen.stdout
        book.interrupt()
        stopped = book.result(cell)
        assert (stopped.ename, "stopped on every rank" in stopped.text) == ("KeyboardInterrupt", True)
        assert "after" in book.run("%%ddl\nprint('after')").stdout

    def test_a_panel_is_drawn_and_freezes(self, book) -> None:
        shown = book.run("%%ddl\nfor step in range(3): ddl.log(metric=step)")
        assert shown.ename is None, shown.text
        frozen = [data for data in shown.displays if "text/html" in data]
        assert frozen
        assert "metric" in frozen[-1]["text/plain"]
        assert not [data for data in shown.displays if "application/vnd.jupyter.widget-view+json" in data]

    def test_what_a_thread_prints_later_stays_with_its_cell(self, book) -> None:
        cell = book.send(
            "%%ddl --ranks 0\nimport threading, time\n"
            "def later():\n    time.sleep(1)\n    print('late words')\n"
            "thread = threading.Thread(target=later); thread.start()"
        )
        assert "late words" not in book.result(cell).stdout
        assert "late words" in book.late(cell, "late words")
        assert "late words" not in book.run("%%ddl --ranks 0\nthread.join()").stdout

    def test_variables_go_both_ways(self, book) -> None:
        shown = book.run("sent = [1, 2]\n%ddl push sent")
        assert shown.ename is None, shown.text
        book.run("%%ddl\nback = [*sent, rank]")
        assert book.run("%ddl pull back").ename is None
        assert book.value("back") == [[1, 2, 0], [1, 2, 1]]

    def test_a_cell_in_the_background_leaves_the_kernel_free(self, book) -> None:
        cell = book.send("%%ddl --bg\nimport time\ntime.sleep(1)\nprint('slept')")
        assert book.result(cell).ename is None
        assert "42" in book.run("print(6 * 7)").stdout
        assert book.run("%ddl wait").ename is None

    def test_ranks_are_gone_after_stop(self, book) -> None:
        pids = book.run("%%ddl -o pids\nimport os\nos.getpid()") and book.value("pids")
        assert book.run("%ddl stop").ename is None
        from tests.notebook import alive

        wait_for(lambda: not alive(pids), what="ranks end")
