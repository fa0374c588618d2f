"""When the panel appears, how often it is drawn, and what stays."""

from __future__ import annotations

import io
import json

import pytest

from ddl_magics.protocol import Outcome
from ddl_magics.telemetry.history import History, RankInfo, RunInfo
from ddl_magics.views.panel import Panel
from ddl_magics.views.screen import TerminalScreen
from tests.notebook import Notebook
from tests.views.simulated import failed, history

pytestmark = pytest.mark.timeout(90)


class Recorder:
    """A screen that keeps what it is given."""

    def __init__(self, kind="notebook"):
        self.kind = kind
        self.shown = []
        self.text = ""

    def display(self, data, display_id=None, *, update=False):
        self.shown.append((data, display_id, update))

    def write(self, name, text):
        self.text += text


class Clock:
    def __init__(self, now):
        self.now = now

    def __call__(self):
        return self.now


def silent(started=1000.0):
    return History(RunInfo("r1", "n", "ddp", 1, started=started), [RankInfo(0)])


def test_a_short_cell_without_metrics_gets_no_panel():
    screen, run, clock = Recorder(), silent(), Clock(1001.0)
    panel = Panel(run, screen, clock)
    panel.tick()
    run.finish([Outcome(0, "ok")], now=1001.5)
    clock.now = 1009.0
    panel.freeze()
    assert screen.shown == []
    assert not panel.shown


def test_a_panel_appears_after_two_seconds_or_with_the_first_metric():
    screen, clock = Recorder(), Clock(1001.9)
    panel = Panel(silent(), screen, clock)
    panel.tick()
    assert not panel.shown
    clock.now = 1002.0
    panel.tick()
    assert panel.shown
    screen = Recorder()
    Panel(history(steps=20), screen, Clock(1000.1)).tick()
    assert len(screen.shown) == 1


def test_a_widget_is_shown_once_redrawn_at_most_four_times_a_second_and_replaced_by_the_picture():
    screen, clock = Recorder(), Clock(1211.0)
    panel = Panel(history(), screen, clock)
    values = []
    panel.tick()
    widget = panel._surface._widget
    widget.observe(lambda change: values.append(change["new"]), "value")
    for i in range(100):
        clock.now = 1211.0 + i / 50
        panel.tick()
    assert len(screen.shown) == 1
    assert len(values) <= 8
    bundle, display_id, update = screen.shown[0]
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert not update
    closed_at = []
    widget.on_widget_constructed(None)
    close, widget.close = widget.close, lambda: (closed_at.append(len(screen.shown)), close())
    panel.freeze()
    still, same_id, update = screen.shown[1]
    assert (same_id, update) == (display_id, True)
    assert set(still) == {"text/html", "text/plain"}
    assert "<svg" in still["text/html"]
    assert closed_at == [2]
    assert widget.comm is None


def test_a_finished_run_can_be_drawn_again():
    screen = Recorder()
    Panel(history(finish=failed()), screen).freeze()
    assert "rank 1 failed" in screen.shown[0][0]["text/plain"]
    assert not screen.shown[0][2]


def test_drawing_takes_at_most_a_share_of_the_time(monkeypatch):
    panel, clock = Panel(history(), Recorder("headless"), Clock(1211.0)), None
    times = iter([0.0, 2.0])
    monkeypatch.setattr("ddl_magics.views.panel.time.monotonic", lambda: next(times))
    panel.tick()
    clock = panel._clock
    assert panel._next == clock.now + 20.0


def test_without_a_reader_there_is_a_line_now_and_then_and_the_picture_at_the_end():
    screen, clock = Recorder("headless"), Clock(1002.0)
    panel = Panel(history(), screen, clock)
    for second in range(600):
        clock.now = 1002.0 + second
        panel.tick()
    panel.freeze()
    lines = screen.text.splitlines()
    assert 10 <= len(lines) <= 60
    assert "step 320 of 500" in lines[0]
    assert "loss 1.7" in lines[0]
    assert [set(data) for data, _, _ in screen.shown] == [{"text/html", "text/plain"}]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_in_a_terminal_text_scrolls_above_a_live_panel_and_the_picture_stays(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    out = Terminal()
    screen, clock = TerminalScreen(out, out), Clock(1211.0)
    panel = Panel(history(), screen, clock)
    panel.tick()
    screen.write("stdout", "[0-3] hello [bold]\n")
    screen.write("stderr", "10%")
    screen.write("stderr", "\r20%")
    assert screen.row == "20%"
    clock.now += 100
    panel.tick()
    screen.write("stderr", "\r   \r")
    panel.freeze()
    screen.write("stdout", "after\n")
    text = out.getvalue()
    assert "[0-3] hello [bold]" in text
    assert "20%" in text
    assert text.rstrip().endswith("after")
    assert "step 320 of 500" in text
    assert screen.live is None


LIVE = """
import sys, threading, time
sys.path.insert(0, {root!r})
from tests.views.simulated import history, failed
from ddl_magics.views.panel import Panel
from ddl_magics.views.screen import current_screen
screen, run = current_screen(get_ipython()), history()
panel, go, gone = Panel(run, screen), threading.Event(), threading.Event()
def work():
    panel.tick()
    screen.write("stdout", "from a thread\\n")
    go.wait(20)
    time.sleep(0.3)
    panel.tick()
    screen.write("stderr", "late, from a thread\\n")
    run.finish(failed())
    panel.freeze()
    gone.set()
thread = threading.Thread(target=work)
thread.start()
print(screen.kind)
"""


def test_what_a_thread_sends_lands_under_the_cell_that_made_the_screen(pytestconfig):
    book = Notebook(load=False)
    try:
        first = book.send(LIVE.format(root=str(pytestconfig.rootpath)))
        book.result(first)
        second = book.send("go.set(); gone.wait(20); print('second')")
        seen = {first: [], second: []}
        while True:
            msg = book.client.get_iopub_msg(timeout=20)
            parent = msg["parent_header"].get("msg_id")
            if parent in seen:
                seen[parent].append(msg)
            if parent == second and msg["content"].get("execution_state") == "idle":
                break
        late = [m for m in seen[first] if m["msg_type"] == "stream"]
        assert "late, from a thread\n" in [m["content"]["text"] for m in late]
        (still,) = [m["content"]["data"] for m in seen[first] if m["msg_type"] == "update_display_data"]
        assert set(still) == {"text/html", "text/plain"}
        assert not [m for m in seen[second] if m["msg_type"] in ("update_display_data", "display_data")]
        text = json.dumps([m["content"] for m in seen[second] if m["msg_type"] == "stream"])
        assert "thread" not in text
        headless = book.run("current_screen(get_ipython()).kind", allow_stdin=False)
        assert headless.displays == [{"text/plain": "'headless'"}]
        captured = book.run(
            "from IPython.utils.capture import capture_output\n"
            "with capture_output() as c: current_screen(get_ipython()).write('stdout', 'kept')\n"
            "c.stdout"
        )
        assert captured.displays == [{"text/plain": "'kept'"}]
    finally:
        book.close()
