"""What the parent of a comparison asks of a worker reaches the run that the worker executes."""

import signal
from multiprocessing.connection import Pipe
from queue import SimpleQueue

from fourbits.compare.run import worker
from fourbits.train.stop import StopRequest


def test_requests_to_save_record_and_stop_reach_the_run(monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(worker.os, "_exit", ended.append)
    receiver, sender = Pipe(duplex=False)
    stop, jobs = StopRequest(), SimpleQueue[int]()
    for message in ((worker.EXECUTE, 3), (worker.SAVE, None), (worker.RECORD, None)):
        sender.send(message)
    sender.send((worker.STOP, signal.SIGTERM))
    sender.close()
    worker._receive(receiver, jobs, stop)
    assert (jobs.get(), stop.signal, ended) == (3, signal.SIGTERM, [0])
    assert (stop.take_save(), stop.take_record()) == (True, True)
    assert (stop.take_save(), stop.take_record()) == (False, False)
