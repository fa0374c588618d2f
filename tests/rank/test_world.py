"""Where a rank is, read from each launcher's environment."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddl_magics.errors import StartError
from ddl_magics.protocol import World
from ddl_magics.rank import device, environment, rendezvous
from ddl_magics.rank.world import from_environment, launched_by

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_NTASKS": "64",
    "SLURM_PROCID": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1(x2)",
}
BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "64", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}


@pytest.mark.parametrize(
    ("environ", "launcher", "world"),
    [
        (TORCHRUN, "torchrun", World(5, 8, 1, 4, node_rank=1, nodes=2)),
        (OPEN_MPI, "Open MPI", World(3, 4, 1, 2)),
        (MPICH, "MPICH", World(1, 2, 1, 2)),
        (SRUN, "srun", World(4, 6, 1, 1, node_rank=2, nodes=3)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "variables set by hand", World(1, 2, 1, 2)),
    ],
)
def test_each_launcher_s_variables_tell_the_place(environ, launcher, world):
    assert launched_by(environ).name == launcher
    assert from_environment("cpu", environ) == world


@pytest.mark.parametrize("environ", [{}, BATCH_SCRIPT], ids=["nothing", "a batch script"])
def test_a_process_that_no_launcher_started_is_a_world_of_one(environ):
    assert from_environment("cpu", environ) == World(0, 1, 0, 1)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        (SRUN | TORCHRUN, "torchrun"),
        (SRUN | OPEN_MPI, "Open MPI"),
        (SRUN | {"PMI_RANK": "9", "PMI_SIZE": "99"} | OPEN_MPI, "Open MPI"),
        (SRUN | MPICH, "MPICH"),
        ({"RANK": "0", "WORLD_SIZE": "1"} | OPEN_MPI, "Open MPI"),
    ],
)
def test_under_mpirun_in_slurm_the_scheduler_s_rank_is_not_trusted(environ, launcher):
    assert launched_by(environ).name == launcher


@pytest.mark.parametrize("broken", [{"RANK": "x"}, {"RANK": "8"}, {"WORLD_SIZE": ""}])
def test_a_broken_variable_is_one_line(broken):
    with pytest.raises(StartError, match="RANK"):
        from_environment("cpu", TORCHRUN | broken)


class TestDevice:
    @pytest.fixture
    def gpus(self, monkeypatch):
        def see(count):
            monkeypatch.setattr(device.torch.cuda, "is_available", lambda: count > 0)
            monkeypatch.setattr(device.torch.cuda, "device_count", lambda: count)

        return see

    def test_one_visible_gpu_a_task_is_device_zero(self, gpus):
        gpus(1)
        assert [device.choose(local_rank, 4) for local_rank in range(4)] == ["cuda:0"] * 4
        assert environment.variables(World(3, 4, 3, 4, device="cuda:0"))["LOCAL_RANK"] == "0"

    def test_several_visible_gpus_are_dealt_by_local_rank(self, gpus):
        gpus(4)
        assert [device.choose(local_rank, 2) for local_rank in range(2)] == ["cuda:0", "cuda:1"]

    def test_more_ranks_than_gpus_is_an_error_with_both_numbers(self, gpus):
        gpus(2)
        with pytest.raises(StartError, match="4 ranks on this node see 2 GPUs"):
            device.choose(3, 4)

    def test_no_gpu_is_the_cpu_unless_one_was_asked_for(self, gpus):
        gpus(0)
        assert device.choose(0, 2) == "cpu"
        with pytest.raises(StartError, match="torch sees none"):
            device.choose(0, 2, "cuda")

    def test_cpu_when_asked_for(self, gpus):
        gpus(4)
        assert device.choose(1, 2, "cpu") == "cpu"


def test_overlay_puts_the_environment_back(monkeypatch):
    monkeypatch.setenv("RANK", "before")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    overlay = environment.Overlay({"RANK": "1", "WORLD_SIZE": "2"})
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("1", "2")
    overlay.remove()
    assert os.environ["RANK"] == "before"
    assert "WORLD_SIZE" not in os.environ


def test_an_address_left_by_a_crashed_job_is_not_followed(tmp_path):
    """Rank 1 meets rank 0 although a file of the same name leads to a port where nobody listens."""
    path = tmp_path / "job.json"
    path.write_text('{"host": "127.0.0.1", "port": 1}')
    with ThreadPoolExecutor() as pool:
        follower = pool.submit(rendezvous._follow, path, World(1, 2, 1, 2), 30.0)
        store = rendezvous._announce(path, World(0, 2, 0, 2), one_host=True, timeout=30.0)
        store.set("greeting", "hello")
        assert follower.result().get("greeting") == b"hello"
    assert not path.exists()


def test_ranks_that_do_not_meet_are_told_what_to_set(tmp_path):
    with pytest.raises(StartError, match=r"did not find one another within 0\.1 s .* Set MASTER_ADDR"):
        rendezvous._follow(tmp_path / "job.json", World(1, 2, 1, 2), 0.1)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = tmp_path / f"ddl_magics-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(StartError, match="others may write"):
        rendezvous._folder(one_host=True)
