"""What a launcher's words and the system's records say of a rank's end, without any rank."""

from __future__ import annotations

from collections import deque

import pytest

from ddl_magics.cluster import oom
from ddl_magics.cluster.endings import Ending, in_launchers_words, of_exit_code

SAID = {
    "prterun noticed that process rank 1 with PID 0 on node vm exited on\nsignal 9 (Killed).": Ending(1, signal=9),
    "mpirun noticed that process rank 3 with PID 812 on node n01 exited on signal 11 (Segmentation fault).": (
        Ending(3, signal=11)
    ),
    "   Process name: [prterun-vm-31749@1,1]\n   Exit code:    3\n": Ending(1, code=3),
    "  Process name: [[123,1],12]\n  Exit code:    1\n": Ending(12, code=1),
    "prterun has exited due to process rank 1 with PID 0 on node vm exiting\nimproperly. There": Ending(1, code=0),
    "MPI_ABORT was invoked on rank 2 in communicator MPI_COMM_WORLD\n  Proc: [[14181,1],2]\n  Errorcode: 5\n": (
        Ending(2, abort=5)
    ),
    "[IPEngine.0.2] CRITICAL | received signal 15, stopping\nMPI_ABORT was invoked on rank 2 in x\n  Errorcode: 1\n": (
        Ending(2, signal=15)
    ),
    "[IPEngine.0.1] CRITICAL | received signal 15, stopping\nMPI_ABORT was invoked on rank 2 in x\n  Errorcode: 1\n": (
        Ending(2, abort=1)
    ),
    "application called MPI_Abort(MPI_COMM_WORLD, 7) - process 1": Ending(1, abort=7),
    "=   EXIT CODE: 9\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)": Ending(signal=9),
    "=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n=   EXIT CODE: 3\n": Ending(code=3),
    "2026 [KernelNanny.1] Parent 31428 exited with status None.\n": None,
}


@pytest.mark.parametrize("printed", SAID)
def test_the_launchers_words_are_understood(printed):
    assert in_launchers_words(f"something else\n{printed}\nmore") == SAID[printed]


def test_an_ending_is_said_with_its_usual_cause_and_lack_of_memory_only_with_evidence():
    assert of_exit_code(-9, 1) == Ending(1, signal=9)
    assert of_exit_code(3).in_words() == "exit code 3: os._exit or sys.exit, by its own code or a library"
    killed = Ending(1, signal=9)
    assert killed.in_words() == "signal 9 Killed: somebody or the system killed it"
    assert killed.in_words("as the kernel's log says") == (
        "signal 9 Killed: the system killed it for lack of memory, as the kernel's log says"
    )
    assert "memory" not in Ending(1, signal=11).in_words("as the kernel's log says")
    assert Ending(signal=77).in_words() == "signal 77 unknown"
    assert Ending(signal=63).in_words().startswith("signal 63")


def test_a_control_group_that_counts_a_kill_is_evidence_and_an_older_kill_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(oom, "CGROUPS", tmp_path)
    monkeypatch.setattr(oom, "kernel_log", lambda: "")
    file = tmp_path / "user" / "job" / "memory.events"
    file.parent.mkdir(parents=True)
    file.write_text("low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\n")
    old = tmp_path / "memory" / "job" / "memory.oom_control"
    old.parent.mkdir(parents=True)
    old.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    assert oom.counter_files("0::/user/job\n") == [file]
    assert oom.counter_files("4:memory:/job\n3:cpu,cpuacct:/job\n0::/gone\n") == [old]
    watch = oom.OutOfMemory([])
    watch._files = {file, old}
    watch._readings = deque([{file: 2, old: 0}], maxlen=2)
    assert watch.evidence(1) == ""
    file.write_text("oom 4\noom_kill 3\n")
    assert watch.evidence(1) == "as its control group counts"
    watch.note()
    watch.note()
    assert watch.evidence(1) == "", "that kill was before"


def test_the_kernels_log_is_evidence_for_the_process_that_it_names(monkeypatch):
    log = (
        "6,1200,5000000,-;oom-kill:constraint=CONSTRAINT_NONE,task=python,pid=41\n"
        "3,1201,5000100,-;Out of memory: Killed process 41 (python) total-vm:1kB\n"
        "3,1202,9000000,-;Memory cgroup out of memory: Killed process 43 (python)\n continued\n"
    )
    assert oom.killed_in(log, since=0) == {41, 43}
    assert oom.killed_in(log, since=6) == {43}
    monkeypatch.setattr(oom, "kernel_log", lambda: log)
    watch = oom.OutOfMemory([])
    watch._began = 6.0
    assert watch.evidence(43) == "as the kernel's log says"
    assert watch.evidence(41) == ""


def test_a_machine_without_such_records_gives_no_evidence(tmp_path, monkeypatch):
    monkeypatch.setattr(oom, "CGROUPS", tmp_path)
    monkeypatch.setattr(oom, "KERNEL_LOG", tmp_path / "kmsg")
    assert oom.OutOfMemory([1]).evidence(1) == ""
