"""What a `%%ddl` cell shows: everything the ranks print, once where they agree, under each where they differ."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(60)]


def test_equal_lines_show_once_with_the_ranks_that_share_them(ranks2):
    shown = ranks2.run("%%ddl\nprint('same')\nprint('only', rank)\nprint('same again')")
    first, *middle, last = shown.stdout.splitlines()
    assert (first, last) == ("[0-1] same", "[0-1] same again")
    assert sorted(middle) == ["[0] only 0", "[1] only 1"]  # in the order in which the ranks print them


def test_blank_lines_braces_and_stderr_come_through(ranks2):
    shown = ranks2.run("%%ddl\nimport sys\nprint()\nprint('{}')\nprint('bad', file=sys.stderr)")
    assert shown.stdout == "[0-1]\n[0-1] {}\n"
    assert shown.stderr == "[0-1] bad\n"


def test_the_last_expression_is_displayed_and_equal_results_once(ranks2):
    assert "[0-1] 42" in ranks2.run("%%ddl\n6 * 7").text
    shown = ranks2.run("%%ddl\nrank * 10")
    assert "[0] 0" in shown.text
    assert "[1] 10" in shown.text
    assert ranks2.run("%%ddl\n6 * 7;").displays == []


def test_what_is_written_to_file_descriptors_and_by_children_comes_through(ranks2):
    shown = ranks2.run("%%ddl\nimport os, subprocess\nos.write(1, b'raw\\n')\nsubprocess.run(['echo', 'from a child']);"
                       "\nimport time\ntime.sleep(0.5)")  # fmt: skip
    assert "[0-1] raw" in shown.stdout
    assert "[0-1] from a child" in shown.stdout


def test_results_of_a_cell_in_the_background_are_kept_too(ranks2):
    ranks2.run("%%ddl --bg -o later\nrank * 10")
    assert ranks2.run("%ddl wait").ename is None
    assert ranks2.value("later") == [0, 10]


def test_images_and_html_come_through(ranks2):
    ranks2.run("%%ddl\nfrom IPython.display import HTML, display\nimport matplotlib.pyplot as plt")
    shown = ranks2.run("%%ddl\ndisplay(HTML('<b>bold</b>'))\nplt.figure(figsize=(1, 1))\nplt.plot([1, 2]);")
    kinds = [kind for data in shown.displays for kind in data]
    assert "image/png" in kinds
    assert [data.get("text/html") for data in shown.displays].count("<b>bold</b>") == 1


def test_magics_shell_and_await_work_on_the_ranks(ranks2):
    shown = ranks2.run("%%ddl\nimport asyncio\n!echo from the shell\n%pwd\nawait asyncio.sleep(0, 'awaited')")
    assert "from the shell" in shown.stdout
    assert "[0-1] 'awaited'" in shown.text
    assert "hello bash" in ranks2.run("%%ddl\n%%bash\necho hello bash").stdout


def test_output_arrives_while_the_cell_runs(ranks2):
    cell = ranks2.send("%%ddl\nimport time\nprint('first', flush=True)\ntime.sleep(5)\nprint('second')")
    early = ranks2.result(cell, until=lambda shown: "first" in shown.stdout)
    assert "second" not in early.stdout
    assert "second" in ranks2.result(cell).stdout


def test_progress_bars_of_all_ranks_stay_in_one_row(ranks2):
    shown = ranks2.run(
        "%%ddl\nfrom tqdm import tqdm\nimport time\n"
        "for _ in tqdm(range(40), desc='steps', ascii=True):\n    time.sleep(0.03)"
    )
    text = shown.stderr + shown.stdout
    assert "steps: 100%" in text
    lines = [line for line in text.split("\n") if "steps" in line]
    assert len(lines) <= 2, text
    assert shown.messages < 60


def test_a_flood_shows_head_and_tail_and_the_log_has_all(ranks2):
    shown = ranks2.run("%%ddl\nfor i in range(100_000):\n    print('line', i)", timeout=60)
    lines = shown.stdout.splitlines()
    assert "[0-1] line 0" in lines
    assert "[0-1] line 99999" in lines
    assert "folded: %ddl log shows all" in shown.stdout
    assert len(lines) < 5000
    assert shown.bytes < 500_000
    log = ranks2.run("%ddl log --rank 1", timeout=60).stdout
    assert all(f"line {i}\n" in log for i in (0, 50_000, 99_999))


def test_what_a_thread_prints_after_its_cell_belongs_to_that_cell(ranks2):
    cell = ranks2.send(
        "%%ddl\nimport threading\ngo = threading.Event()\n"
        "def late():\n    go.wait()\n    print('late words', rank)\n"
        "thread = threading.Thread(target=late)\nthread.start()"
    )
    ranks2.result(cell)
    follow = ranks2.send("%%ddl\ngo.set()\nthread.join()\nprint('my own words')")
    text = ranks2.late(cell, "late words 0")
    assert "my own words" not in text
    log = ranks2.run("%ddl log --rank 0").stdout
    assert "late words 0" in log
    assert ranks2.run("%%ddl\n1").ename is None
    del follow


def test_rank0_and_all_and_quiet_choose_what_is_shown(ranks2):
    assert ranks2.run("%%ddl --output rank0\nprint('from', rank)").stdout == "from 0\n"
    assert sorted(ranks2.run("%%ddl --output all\nprint('same')").stdout.splitlines()) == ["[0] same", "[1] same"]
    assert ranks2.run("%%ddl --ranks 1\nprint('from', rank)").stdout == "from 1\n"


def test_results_are_kept_by_rank_in_a_variable_and_nothing_else_changes(ranks2):
    before = ranks2.value("sorted(name for name in globals() if not name.startswith('_'))")
    shown = ranks2.run("%%ddl -o results\ncounter = 5\n{'rank': rank}")
    assert shown.ename is None
    assert ranks2.value("results") == [{"rank": 0}, {"rank": 1}]
    after = ranks2.value("sorted(name for name in globals() if not name.startswith('_'))")
    assert set(after) - set(before) == {"results"}


def test_a_cell_in_the_background_leaves_the_kernel_free(ranks2):
    cell = ranks2.send("%%ddl --bg\nimport time\ntime.sleep(2)\nprint('done at last')")
    ranks2.result(cell, 5)
    assert ranks2.run("1 + 1").text.strip() == "2"
    assert "running" in ranks2.run("%ddl status").text
    assert ranks2.run("%%ddl\n1").ename == "BusyError"
    wait = ranks2.send("%ddl wait")
    assert "done at last" in ranks2.late(cell, "done at last")
    assert ranks2.result(wait).ename is None
    assert ranks2.run("%%ddl\n1").ename is None


def test_nothing_is_lost_when_the_reader_goes_away_during_a_cell(ranks2):
    cell = ranks2.send(
        "%%ddl --name unseen\nimport time\nprint('begun', flush=True)\n"
        "for step in range(20):\n    print('step', step)\n    ddl.log(loss=step)\n    time.sleep(0.1)"
    )
    ranks2.result(cell, until=lambda shown: "begun" in shown.stdout)
    ranks2.reconnect()
    assert ranks2.run("'awake'").text.strip() == "'awake'"
    log = ranks2.run("%ddl log --rank 1").stdout
    assert all(f"step {step}\n" in log for step in range(20))
    assert "at step 20" in ranks2.run("%ddl show unseen").displays[-1]["text/plain"]
