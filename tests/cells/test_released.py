"""One rank fails while the others wait: the cause first, the others free, variables kept, the next cell works."""

from __future__ import annotations

import re

import nbformat
import pytest
from nbclient import NotebookClient

from tests.cells.scenarios import AFTER, SCENARIOS, SETUP, Scenario, check_after, check_failure

pytestmark = [pytest.mark.mpi, pytest.mark.timeout(90)]


def name(scenario: Scenario) -> str:
    return scenario.name


@pytest.fixture(scope="module")
def ready(ranks2):
    shown = ranks2.run(SETUP)
    assert shown.ename is None, shown.text
    return ranks2


@pytest.mark.parametrize("scenario", [*SCENARIOS, SCENARIOS[0].by(0)], ids=name)
def test_the_cause_is_first_the_others_are_free_and_the_next_cell_works(ready, scenario):
    shown = ready.run(scenario.cell(), timeout=20)
    check_failure(scenario, shown.ename, shown.text)
    after = ready.run(AFTER, timeout=20)
    assert after.ename is None, after.text
    assert after.text.count("process group made anew after In[") == 1
    check_after(after.text, 2)


def test_the_same_through_nbclient(tmp_path):
    cells = ["%load_ext ddl_magics\n%ddl start -n 2", SETUP]
    for scenario in SCENARIOS:
        cells += [scenario.cell(), AFTER]
    cells.append("%ddl stop")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in cells])
    NotebookClient(notebook, timeout=60, allow_errors=True, kernel_name="python3").execute()
    for scenario, failed, after in zip(SCENARIOS, notebook.cells[2:-1:2], notebook.cells[3:-1:2], strict=True):
        errors = [output for output in failed.outputs if output.output_type == "error"]
        assert [error.ename for error in errors] == ["CellError"], failed.outputs
        check_failure(scenario, errors[0].ename, "\n".join(errors[0].traceback))
        assert [output for output in after.outputs if output.output_type == "error"] == []
        check_after("".join(output.get("text", "") for output in after.outputs), 2)
    assert "2 ranks stopped" in notebook.cells[-1].outputs[0].text


def test_a_lack_of_memory_shows_what_every_rank_held(ready):
    scenario = next(scenario for scenario in SCENARIOS if scenario.name == "out of memory")
    shown = ready.run("%%ddl\nbig = torch.ones(2_000_000 * (rank + 1))\n" + scenario.cell().partition("\n")[2])
    table = shown.traceback[shown.traceback.index("Memory when the cell ended on each rank") :].splitlines()
    assert table[1].split()[:3] == ["rank", "other", "total"]
    assert [line.split()[0] for line in table[2:4]] == ["0", "1"]
    held = [float(line.split()[2]) for line in table[2:4]]
    assert held[1] > held[0] + 5
    check_after(ready.run(AFTER).text, 2)


def test_two_ranks_that_fail_differently_are_both_shown_the_first_in_time_first(ready):
    shown = ready.run(
        "%%ddl\nif rank == 0:\n    time.sleep(0.2)\n    raise KeyError('second')\nraise ValueError('first')"
    )
    assert shown.traceback.index("ValueError: first") < shown.traceback.index("KeyError: 'second'")
    assert "rank 1 failed in line 5 of the cell with ValueError: first; rank 0 failed after that" in shown.evalue


def test_equal_errors_of_all_ranks_cost_no_group(ready):
    ready.run("%%ddl\nkeep = dist.new_group(everybody)")
    assert "ranks 0-1 failed" in ready.run("%%ddl\nraise ValueError('all')").evalue
    after = ready.run("%%ddl\nsum_ = torch.ones(1)\ndist.all_reduce(sum_, group=keep)\nprint(sum_.item())")
    assert "[0-1] 2.0" in after.text, after.text
    assert "made anew" not in after.text


def test_a_step_that_failed_alike_on_all_ranks_is_begun_again_and_costs_no_group(ready):
    assert ready.run(TRAIN.format(strategy="ddp", steps=4), timeout=60).ename is None
    uninterrupted = ready.run(GO_ON, timeout=60).stdout
    ready.run("%%ddl\nkeep = dist.new_group(everybody)")
    assert ready.run(TRAIN.format(strategy="ddp", steps=4), timeout=60).ename is None
    half = (
        "%%ddl --no-panel\nfor x, y in ddl.track(loader):\n    ddl.backward(net(x).sum())\n    raise ValueError('all')"
    )
    assert "ranks 0-1 failed" in ready.run(half).evalue
    shown = ready.run(GO_ON, timeout=60)
    assert "a training step was cut off in In[" in shown.stderr
    assert shown.stdout == uninterrupted
    assert ready.run("%%ddl\ndist.all_reduce(torch.ones(1), group=keep)").ename is None


def test_ranks_out_of_step_are_found_also_when_nobody_waits(ready):
    shown = ready.run("%%ddl\nif rank == 0:\n    work = dist.all_reduce(torch.ones(3), async_op=True)")
    assert shown.ename is None, shown.text
    after = ready.run(AFTER, timeout=20)
    assert "ranks made different numbers of collectives" in after.text
    check_after(after.text, 2)


def test_a_group_that_is_gone_is_named_when_it_is_used(ready):
    ready.run("%%ddl\nold = dist.new_group(everybody)\nwrapped = DistributedDataParallel(torch.nn.Linear(2, 2))")
    ready.run(SCENARIOS[0].cell())
    assert "groups of dist.new_group" in ready.run(AFTER).text
    for use in ("dist.all_reduce(torch.ones(1), group=old)", "wrapped(torch.ones(1, 2)).sum().backward()"):
        shown = ready.run(f"%%ddl\n{use}", timeout=20)
        assert shown.ename == "CellError", shown.text
        assert "a process group from before In[" in shown.evalue
        assert "Make it again" in shown.evalue
        check_after(ready.run(AFTER, timeout=20).text, 2)


TRAIN = """%%ddl --no-panel --strategy {strategy} --seed 3
with ddl.model_init():
    net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
data = [(torch.randn(16), torch.randn(1)) for _ in range(64)]
net, optimizer, loader = ddl.prepare(net, optimizer, torch.utils.data.DataLoader(data, batch_size=8))
def train(steps):
    for step, (x, y) in enumerate(ddl.track(loader)):
        if step == steps:
            return
        if step == 4 and rank == 1:
            raise ValueError("a bad sample")
        loss = (net(x) - y).square().mean()
        ddl.backward(loss)
        ddl.step()
train({steps})"""
GO_ON = """%%ddl --no-panel
for x, y in ddl.track(loader):
    loss = (net(x) - y).square().mean()
    ddl.backward(loss)
    ddl.step()
print(f"mean loss {ddl.all_reduce_mean(loss.detach()).item():.6f}")"""


@pytest.mark.parametrize("strategy", ["ddp", "zero:2", "zero:3", "axonn:2x1x1"])
def test_training_goes_on_from_where_it_was_with_the_same_model(ready, strategy):
    assert ready.run(TRAIN.format(strategy=strategy, steps=4), timeout=60).ename is None
    uninterrupted = ready.run(GO_ON, timeout=60).stdout
    assert "[0-1] mean loss" in uninterrupted
    failed = ready.run(TRAIN.format(strategy=strategy, steps=5), timeout=60)
    assert "rank 1 failed in line 12 of the cell with ValueError: a bad sample" in failed.evalue
    shown = ready.run(GO_ON, timeout=60)
    assert "Sequential of ddl.prepare" in shown.stderr
    assert shown.stdout == uninterrupted


def lone(cell):
    """The same with a model that only rank 0 has, which no other rank's failure concerns, and batches in pairs."""
    cell = (
        cell.replace("net", "solo").replace("loader", "batches").replace("batch_size=8)", "batch_size=8), accumulate=2")
    )
    return cell.replace("--strategy ddp", "").replace("%%ddl", "%%ddl --strategy single")


def test_a_model_of_rank_0_alone_begins_its_step_again_and_is_no_matter_of_other_ranks(ready):
    assert ready.run(lone(TRAIN.format(strategy="ddp", steps=2))).ename is None
    uninterrupted = ready.run(lone(GO_ON)).stdout
    assert "mean loss" in uninterrupted
    left = "left = ddl.prepare(torch.nn.Sequential(torch.nn.Linear(2, 2)))"
    assert ready.run(f"%%ddl\n{left}\nif rank == 0:\n    left = None").ename is None
    failing = lone(TRAIN.format(strategy="ddp", steps=4)).replace("step == 4 and rank == 1", "step == 3")
    assert "a bad sample" in ready.run(failing).evalue
    shown = ready.run(lone(GO_ON))
    assert re.fullmatch(r"a training step was cut off in In\[\d+\]: .*Sequential.* begins it again\n", shown.stderr)
    assert shown.stdout == uninterrupted
    ready.run("%%ddl\nleft = None")


def test_a_model_of_rank_0_alone_outlives_a_failure_of_all_ranks(ready):
    ready.run(lone(TRAIN.format(strategy="ddp", steps=2)))
    uninterrupted = ready.run(lone(GO_ON)).stdout
    assert "mean loss" in uninterrupted
    ready.run(lone(TRAIN.format(strategy="ddp", steps=2)))
    assert ready.run(TRAIN.format(strategy="ddp", steps=4), timeout=60).ename is None
    expected = ready.run(GO_ON, timeout=60).stdout
    for strategy in ("ddp", "single,ddp"):
        failed = ready.run(TRAIN.format(strategy=strategy, steps=5), timeout=60)
        assert "rank 1 failed in line 12 of the cell with ValueError: a bad sample" in failed.evalue
        shown = ready.run(GO_ON, timeout=60)
        assert re.fullmatch(r"process group made anew after .*Sequential.*Sequential 2 of ddl.prepare\n", shown.stderr)
        assert shown.stdout == expected
    assert ready.run(lone(GO_ON)).stdout == uninterrupted


def test_deepspeed_of_the_users_own_forgets_the_world_that_is_gone(ready):
    code = (
        "%%ddl\ntotal = torch.ones(1)\ndist.all_reduce(total, group=groups._clone_world_group())\nprint(total.item())"
    )
    ready.run("%%ddl\nfrom deepspeed.utils import groups\ngroups.dist = dist", timeout=40)  # as `init_distributed` does
    assert "[0-1] 2.0" in ready.run(code).text
    ready.run(SCENARIOS[0].cell())
    assert "[0-1] 2.0" in ready.run(code, timeout=20).text


def test_a_recovery_that_fails_on_one_rank_is_told_and_tried_again(ready):
    ready.run(
        "%%ddl\nfrom ddl_magics.rank import group\nreopen = group.reopen_group\ndef broken(occasion):\n"
        "    group.reopen_group = reopen\n    raise RuntimeError('not now')\n"
        "if rank == 1:\n    group.reopen_group = broken"
    )
    ready.run(SCENARIOS[0].cell())
    shown = ready.run(AFTER, timeout=20)
    assert shown.ename == "RecoveryError", shown.text
    assert "not now" in shown.evalue
    assert "%ddl restart" in shown.evalue
    check_after(ready.run(AFTER, timeout=20).text, 2)


def test_only_the_connections_of_groups_are_shut(ready):
    ready.run(
        "%%ddl\nimport socket\nserver = socket.create_server(('127.0.0.1', 0)) if rank == 1 else None\n"
        "port = ddl.all_gather(server.getsockname()[1] if server else 0)[1]\n"
        "line = server.accept()[0] if rank == 1 else socket.create_connection(('127.0.0.1', port))"
    )
    assert ready.run(SCENARIOS[0].cell()).ename == "CellError"
    shown = ready.run("%%ddl\nline.send(b'still here')\nprint(line.recv(100))")
    assert "[0-1] b'still here'" in shown.text, shown.text


def test_ten_failures_leave_no_thread_socket_group_or_memory_behind(ready):
    count = (
        "%%ddl\nimport gc, os, psutil\ngc.collect()\nme = psutil.Process()\n"
        "print([len(os.listdir('/proc/self/fd')), me.num_threads(), len(me.net_connections()),"
        " len(dist.distributed_c10d._world.pg_map)], me.memory_info().rss >> 20)"
    )
    failing = (
        "%%ddl --no-panel\ngroup = dist.new_group(everybody)\nif rank == 1:\n    raise ValueError\ndist.barrier(group)"
    )
    free = "%%ddl --no-panel\ngroup = None"
    for cell in (failing, free):
        ready.run(cell)
    first = ready.run(count).stdout
    for _ in range(10):
        assert ready.run(failing).ename == "CellError"
        assert ready.run(free).ename is None
    last = ready.run(count).stdout
    for rank in (0, 1):
        before, after = (next(line for line in text.splitlines() if f"[{rank}]" in line) for text in (first, last))
        assert before.rpartition(" ")[0] == after.rpartition(" ")[0]
        assert int(after.split()[-1]) - int(before.split()[-1]) < 20, (before, after)
