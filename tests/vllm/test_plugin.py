"""What the general plugin changes in vLLM's engine process, with vLLM's own message queue."""

import threading
import warnings
from types import SimpleNamespace

import pytest

with warnings.catch_warnings(action="ignore"):  # torch's own, when vLLM imports parts of it
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
    from vllm.v1.engine.core import EngineCore

from syncline.adapters.engines.vllm.plugin import register

LONG_S = 3600.0


@pytest.fixture
def engine():
    """A waiting engine: `answers` is what it reads, `call(method)` its `collective_rpc`; a worker answers once it sleeps."""
    register()
    register()  # it may be called again, and wraps once
    worker = MessageQueue(n_reader=1, n_local_reader=1)
    answers = MessageQueue.create_from_handle(worker.export_handle(), 0)
    connected = threading.Thread(target=worker.wait_until_ready)
    connected.start()
    answers.wait_until_ready()
    connected.join(10)
    condition = answers._spin_condition
    condition.busy_loop_s = LONG_S  # it would spin for ever

    executor = SimpleNamespace(response_mqs=[answers], collective_rpc=lambda *_: answers.dequeue(timeout=2))
    core = SimpleNamespace(model_executor=executor)
    asleep = threading.Event()
    poller = condition.poller

    class Poller:
        def poll(self, timeout=None):
            asleep.set()
            return poller.poll(timeout)

    condition.poller = Poller()

    def answer():
        if asleep.wait(10):
            worker.enqueue("done")

    def call(method):
        answering = threading.Thread(target=answer)
        answering.start()
        try:
            return EngineCore.collective_rpc(core, method)
        finally:
            asleep.set()
            answering.join(10)

    yield SimpleNamespace(call=call, answers=answers, worker=worker, asleep=asleep)
    worker.shutdown()


def test_the_engine_sleeps_until_an_update_is_over(engine):
    assert engine.call("update_weights") == "done"


def test_it_waits_for_everything_else_as_it_did(engine):
    engine.worker.enqueue("read")
    assert engine.answers.dequeue(timeout=10) == "read"
    with pytest.raises(TimeoutError):  # nobody answers before it sleeps, and it spins
        engine.call("execute_model")


def test_another_executor_is_left_alone():
    register()
    executor = SimpleNamespace(collective_rpc=lambda method, *_: method)
    assert EngineCore.collective_rpc(SimpleNamespace(model_executor=executor), "update_weights") == "update_weights"
