"""What a rank's engine takes of ipykernel's and ipyparallel's private interface still is what we take it for."""

from __future__ import annotations

import contextvars
import inspect
import threading

from ipykernel.compiler import XCachingCompiler, get_tmp_directory
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelbase import Kernel
from ipyparallel.engine import app
from ipyparallel.engine.kernel import IPythonParallelKernel

from ddl_magics.rank import engine


def test_the_engine_makes_the_kernel_that_its_module_names():
    assert "self.kernel = Kernel.instance(" in inspect.getsource(app.IPEngine.complete_registration)
    assert app.Kernel is IPythonParallelKernel


def test_control_messages_find_their_handler_by_the_name_of_the_message():
    assert "ddl_request" in engine.RankKernel.control_msg_types
    assert "control_msg_types" in inspect.getsource(Kernel.__init__)


def test_code_runs_through_do_execute_and_requests_keep_their_metadata():
    assert inspect.iscoroutinefunction(IPythonKernel.do_execute)
    assert "get_parent" in dir(Kernel)
    assert "self.do_execute(**do_execute_args)" in inspect.getsource(Kernel.execute_request)


def test_code_typed_in_a_cell_is_known_by_its_file_name():
    name = XCachingCompiler().get_code_name("1 + 1", "1 + 1", 3)
    assert engine.is_cell_file(name)
    assert name.startswith(get_tmp_directory())
    assert not engine.is_cell_file(__file__)


def test_a_thread_sees_the_context_of_the_code_that_started_it(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)
    engine.threads_keep_their_cell()
    variable = contextvars.ContextVar("cell")
    variable.set("first")
    seen = []
    engine._in_cell.set(True)
    thread = threading.Thread(target=lambda: seen.append(variable.get("none")))
    thread.start()
    thread.join()
    engine._in_cell.set(False)
    assert seen == ["first"]
