"""Checkpoints of several ranks: any strategy to any, failures on one rank, and kills."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from tests.strategies.ranks import ENVIRONMENT, ROOT, start

pytestmark = pytest.mark.mpi
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    home = tmp_path_factory.mktemp("failing")
    mounts = [home / "full", home / "readonly"]
    for mount in mounts:
        mount.mkdir()
    (home / "disk").mkdir()
    try:
        mounted = mount_tmpfs(mounts[0], "size=900k") and mount_tmpfs(mounts[1], "ro")
        more = [str(mount) for mount in mounts] if mounted else []
        found = start("../checkpoint/failing_ranks.py", 2, home, str(home / "disk"), *more, timeout=110)
        assert found.returncode == 0, found.output[-4000:]
        yield found, home
    finally:
        for mount in mounts:
            subprocess.run(["umount", str(mount)], check=False, capture_output=True)


class TestFailures:
    @pytest.fixture
    def of(self, found):
        """What both ranks found alike."""

        def get(check):
            first, second = found[0].of(check)
            assert first == second
            return first

        return get

    @pytest.fixture
    def mounted(self, found):
        if "full" not in found[0].ranks[0]:
            pytest.skip("no right to mount a tmpfs here")

    def test_each_rank_writes_its_part(self, of):
        assert of("files") == [
            "ddl.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "optimizer",
        ]

    def test_ranks_that_name_different_folders_are_told(self, of):
        assert re.search(
            r"save\(path\) is \S+/rank1 on rank 1 and \S+/rank0 on rank 0. Give all ranks the same", of("paths")
        )
        assert of("paths left") == ["run"]

    def test_what_one_rank_cannot_save_fails_on_all(self, of):
        assert "what is a builtin_function_or_method, which a checkpoint cannot hold" in of("extra")

    def test_a_rank_that_cannot_write_fails_all_and_loses_nothing(self, of):
        assert re.search(r"CheckpointError: Rank 1 could not write to \S+/run: File too large", of("one rank"))
        assert re.search(r"the checkpoint has [\d,]{7,} bytes, [\d,]+ are free", of("one rank"))
        assert of("one rank after") == [["latest", "step-2"], "step-2\n", 2, True]
        assert of("one rank goes on") == [True, "step-4", ["latest", "step-4"]]

    def test_a_damaged_file_that_one_rank_reads_fails_all(self, of):
        assert "model-00002-of-00002.safetensors is not as it was written" in of("damaged")
        assert "There is no folder" in of("missing")
        assert of("fewer") == 0

    def test_a_full_disk_fails_all_and_loses_nothing(self, of, mounted):
        assert of("full first") == "step-4"
        assert re.search(
            r"Rank [01] could not write to \S+/full/run: No space left on device \(the checkpoint has", of("full")
        )
        assert "Free space there, or save elsewhere" in of("full")
        assert of("full after") == [["latest", "step-4"], "step-4\n", 4, True]
        assert "No space left" in of("full again")
        assert of("full goes on") == "step-6"

    def test_a_file_system_that_cannot_be_written_is_told(self, of, mounted):
        assert re.search(r"Rank 0: Read-only file system \(\S+/readonly/run\)", of("read-only"))

    def test_a_folder_that_the_ranks_do_not_share_is_told(self, of, found, mounted):
        assert re.search(
            r"/shared on rank 1 \(\S+\) is another folder than on rank 0 \(\S+\). Save into a folder", of("not shared")
        )
        assert found[0].of("not shared left") == [[], []]

    def test_sharded_weights_are_read_by_from_pretrained(self, of, found):
        from transformers import AutoModelForCausalLM

        assert "model.safetensors.index.json" in of("sharded")
        read = AutoModelForCausalLM.from_pretrained(found[1] / "disk" / "llama" / "step-0")
        weights = torch.load(found[1] / "disk" / "llama.pt", weights_only=True)
        assert read.state_dict().keys() == weights.keys()
        assert all(torch.equal(value, weights[name]) for name, value in read.state_dict().items())


def mount_tmpfs(path: Path, options: str) -> bool:
    """Whether there is a file system of its own at `path` now."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], check=False, capture_output=True)
    return done.returncode == 0


class TestKills:
    @pytest.fixture
    def memory(self):
        """A folder in memory, where waiting for the disk takes no time."""
        parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        with tempfile.TemporaryDirectory(prefix="ddl-tests-", dir=parent) as folder:
            yield Path(folder)

    def run(self, script, folder, *arguments):
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(folder), *arguments],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((folder / "findings.json").read_text())

    @pytest.mark.timeout(120)
    def test_before_each_change_to_the_file_system_leave_the_old_or_the_new_one_whole(self, memory):
        found = self.run("kill_points.py", memory)
        expected = {"first": ([-1, "none"], [6, "new"]), "next": ([3, "old"], [6, "new"])}
        for name, result in found.items():
            old, new = ([*state, True] for state in expected.get(name, ([3, "old"], [3, "new"])))
            seen = result["loaded"]
            switch = seen.index(new)
            assert 5 < switch < len(seen), name
            assert seen == [old] * switch + [new] * (len(seen) - switch), name
            assert max(result["hidden"]) >= 1
            assert not any(result["left"]), "the next save leaves nothing of dead ones"

    @pytest.mark.timeout(120)
    def test_of_ranks_at_any_moment_leave_a_whole_one_and_free_the_other(self, memory):
        found = self.run("killed_ranks.py", memory, "5", "1")
        for kill in found["kills"]:
            outcomes = ["killed" if rank in kill["victims"] else "told an error" for rank in range(2)]
            assert kill["outcomes"] == outcomes, kill
            returned = int(kill["returned"].removeprefix("step-"))
            assert kill["loaded"] in {returned, returned + 3}, kill
        assert found["left"] == ["latest", f"step-{found['kills'][-1]['loaded']}"]
