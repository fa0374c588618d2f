"""The parts of ipyparallel's private interface that the notebook's side stands on still are what we take them for."""

from __future__ import annotations

import inspect
from concurrent.futures import Future

import ipyparallel as ipp
from ipyparallel.client.asyncresult import AsyncResult
from ipyparallel.client.client import unpack_message
from ipyparallel.client.futures import MessageFuture
from ipyparallel.cluster.launcher import LocalEngineSetLauncher, MPIEngineSetLauncher


def test_iopub_messages_go_through_one_method_that_gets_them_unpacked():
    assert "_iopub_stream.on_recv(self._dispatch_iopub" in inspect.getsource(ipp.Client._setup_streams)
    assert list(inspect.signature(ipp.Client._dispatch_iopub.__wrapped__).parameters) == ["self", "msg"]
    assert callable(unpack_message)


def test_requests_can_carry_metadata_and_are_known_before_they_are_sent():
    parameters = inspect.signature(ipp.Client.send_execute_request).parameters
    assert {"socket", "code", "silent", "metadata", "ident", "message_future_hook"} <= set(parameters)
    source = inspect.getsource(ipp.Client._send)
    assert source.index("message_future_hook(futures[0])") < source.index("add_callback(_really_send)")


def test_replies_are_futures_with_a_message_id():
    assert issubclass(MessageFuture, Future)
    assert MessageFuture("some-id", header={}).msg_id == "some-id"
    assert issubclass(AsyncResult, Future)


def test_a_lost_engine_is_told_to_callbacks_with_its_number():
    source = inspect.getsource(ipp.Client._unregister_engine)
    assert "_registration_callbacks" in source
    assert '"event": "unregister"' in source
    assert "EngineError" in inspect.getsource(ipp.Client._handle_stranded_msgs)


def test_control_requests_are_addressed_to_single_engines():
    source = inspect.getsource(ipp.Client._send_control_request)
    assert "self._send(self._control_stream, msg_type, content=content, ident=ident)" in source


def test_launchers_build_their_command_from_program_and_arguments():
    source = inspect.getsource(MPIEngineSetLauncher.__mro__[1].find_args)
    assert "self.mpi_cmd" in source
    assert "self.program" in source
    assert "launcher_class" in inspect.getsource(LocalEngineSetLauncher.start)
