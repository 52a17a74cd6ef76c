"""What processes tell each other: here threads over a store in memory stand for them."""

import json
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from llmx.runtime import agreement, exits, job, launch
from llmx.runtime.agreement import Disagreement, Peers
from llmx.runtime.clusters import Cluster
from llmx.runtime.launch import LaunchConfig, bind_address
from llmx.runtime.signals import AHEAD, StopSignal


class Memory:
    """As `agreement.Store`, in memory."""

    def __init__(self, count: int):
        self.texts, self.changed, self.count = {}, threading.Condition(), count
        self.barriers = {}

    def put(self, key, text):
        with self.changed:
            self.texts[key] = text
            self.changed.notify_all()

    def get(self, key, seconds):
        with self.changed:
            assert self.changed.wait_for(lambda: key in self.texts, min(seconds, 20)), key
            return self.texts[key]

    def delete(self, key):
        with self.changed:
            del self.texts[key]

    def list(self, folder):
        with self.changed:
            pairs = self.texts.items()
            return {k.rsplit("/", 1)[1]: t for k, t in pairs if k.startswith(f"{folder}/")}

    def barrier(self, name, seconds):
        with self.changed:
            barrier = self.barriers.setdefault(name, threading.Barrier(self.count))
        barrier.wait(min(seconds, 5))


def together(count: int, work) -> list:
    """What `work(peers)` returned or raised, by process."""
    store = Memory(count)

    def one(index):
        try:
            return work(Peers(store, index, count))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def test_one_process_waits_for_none():
    peers = Peers()
    peers.agree("start", {"a": 1})
    peers.barrier("b")
    assert peers.exchange("x", "mine") == ["mine"] and peers.broadcast("x", "mine") == "mine"
    peers.refuse("nothing happens")


def test_texts_go_around():
    def work(peers):
        first = peers.exchange("name", f"a{peers.index}")
        second = peers.exchange("name", f"b{peers.index}")
        return first, second, peers.broadcast("one", str(peers.index))

    assert together(3, work) == [(["a0", "a1", "a2"], ["b0", "b1", "b2"], "0")] * 3


def test_equal_values_agree_and_others_are_named():
    values = {"optimizer.learning_rate": 1e-3, "data.sources": ("a", "b"), "seed": 0}
    assert together(3, lambda peers: peers.agree("start", values)) == [None] * 3

    def work(peers):
        peers.agree("start", values | ({"optimizer.learning_rate": 2e-3} if peers.index else {}))

    zero, one = together(2, work)
    assert isinstance(one, Disagreement)
    for words in ("optimizer.learning_rate is 0.002, in process 0 0.001", "process 1 of 2",
                  socket.gethostname(), "same command"):  # fmt: skip
        assert words in str(one)
    assert isinstance(zero, threading.BrokenBarrierError)  # it waits, until the refusal reaches it


def test_versions_name_the_code():
    found = agreement.versions()
    assert found["jax"] and "+" in found["llmx"] and found == agreement.versions()


@pytest.mark.parametrize("ahead", [0, 1, 5])
def test_all_stop_at_one_step(ahead):
    """However far apart the processes are when one of them asks: none has to go back."""
    count, gate = 3, threading.Barrier(3)

    def work(peers):
        stop = StopSignal(log=lambda text: None)
        stop.join(peers)
        threading.Thread(target=looks, args=(stop,), daemon=True).start()
        step = 10 + (ahead if peers.index == 1 else 0)
        for reached in range(step):
            assert not stop.agreed(reached)
        gate.wait()
        if peers.index == 2:
            stop.request("a test", exits.UNSAVED)
        while not stop.agreed(step):
            step += 1
            time.sleep(0.01)
            assert step < 2000
        return step, stop.code

    def looks(stop):
        for _ in range(400):
            stop._look()
            time.sleep(0.02)

    found = together(count, work)
    assert len(set(found)) == 1, found
    step, code = found[0]
    assert code == exits.UNSAVED and step >= 10 + ahead + AHEAD - 1


def run_python(code: str, *arguments: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *arguments], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, exits.TERMINATED), (signal.SIGINT, exits.INTERRUPTED)]
)
def test_a_signal_before_the_first_step_ends_at_once_and_says_so(number, code):
    """Even where the main thread is in foreign code, as a compiler's."""
    child = run_python("""
        import ctypes, sys
        from llmx.runtime.job import Job
        with Job(log=print) as job, job.progress("compile"):
            job.peers.endings.append(lambda: print("released", flush=True))
            print("ready", flush=True)
            while True:
                ctypes.CDLL(None).sleep(60)
    """)
    assert child.stdout.readline() == "ready\n"
    began = time.monotonic()
    child.send_signal(number)
    said = child.communicate(timeout=50)[0]
    assert child.returncode == code and time.monotonic() - began < 30, said
    assert signal.Signals(number).name in said and "'compile'" in said and "nothing new" in said
    assert "released" in said  # the work directory


def test_a_cause_that_does_not_answer_keeps_no_ending_from_running():
    """As where the store that holds the lease is down."""
    child = run_python("""
        import time
        from llmx.runtime import exits
        from llmx.runtime.job import Job
        with Job(log=print) as job:
            job.peers.causes.append(lambda: time.sleep(60))
            job.peers.endings.append(lambda: print("released", flush=True))
            job.peers.end(exits.AGAIN, "the cause that is known")
    """)
    said = child.communicate(timeout=50)[0]
    assert child.returncode == exits.AGAIN, said
    assert "released" in said and said.splitlines()[-1] == "the cause that is known"


def test_a_process_ends_where_nobody_reads_its_log():
    child = run_python(
        """
        import os, sys
        from llmx.runtime.job import Job
        with Job(log=print) as job:
            print("ready", flush=True)
            sys.stdin.readline()
            job.refuse("the data is wrong")
            job.peers.end(75, "the end")
    """,
        stdin=subprocess.PIPE,
    )
    assert child.stdout.readline() == "ready\n"
    child.stdout.close()
    child.stdin.write("go\n")
    child.stdin.close()
    assert child.wait(20) == 75


def test_an_owner_that_awakes_late_says_that_its_directory_is_another_s(tmp_path):
    """Also where the watchdog, or the silence of others, would end it first."""
    child = run_python(
        """
        import json, pathlib, sys
        from llmx.runtime import ownership
        from llmx.runtime.job import Job
        with Job(log=print) as job:
            job.own(sys.argv[1])
            record = ownership.own_record(20.0) | {"host": "another"}
            pathlib.Path(sys.argv[1], ownership.FILE).write_text(json.dumps(record))
            job.peers.end(75, "no step for 60 s")
    """,
        str(tmp_path),
    )
    said, _ = child.communicate(timeout=60)
    assert child.returncode == exits.REFUSED, said
    assert "was taken over by process" in said.splitlines()[-1] and "no step" not in said


def test_the_cause_of_a_refusal_is_the_last_line(capfd):
    with job.Job(log=print) as run:
        run.callback(lambda: print("3 records are not in metrics.jsonl", file=sys.stderr))
        assert run.refuse("the disk is full", exits.UNSAVED) == exits.UNSAVED
    assert capfd.readouterr().err.splitlines() == [
        "3 records are not in metrics.jsonl", "the disk is full",
    ]  # fmt: skip


def test_the_coordinator_listens_where_it_is_told():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = Cluster(f"127.0.0.1:{port}", 2, 0)
    assert bind_address(LaunchConfig(), cluster) == f"127.0.0.1:{port}"
    assert bind_address(LaunchConfig(), Cluster(f"localhost:{port}", 2, 0)).endswith(
        (f"127.0.0.1:{port}", f"[::1]:{port}")
    )
    assert bind_address(LaunchConfig(bind_address="127.0.0.2"), cluster) == f"127.0.0.2:{port}"
    assert bind_address(LaunchConfig(), Cluster(f"127.0.0.1:{port}", 2, 1)) is None
    # An address of another machine, as of a service in front of this one.
    assert bind_address(LaunchConfig(), Cluster(f"192.0.2.7:{port}", 2, 0)) == f"[::]:{port}"
    with pytest.raises(ValueError, match=r"192.0.2.7.*address of this machine"):
        bind_address(LaunchConfig(bind_address="192.0.2.7"), cluster)
    with pytest.raises(ValueError, match="needs the coordinator's port"):
        bind_address(LaunchConfig(bind_address="127.0.0.1"), Cluster())


def test_a_port_in_use_is_named(monkeypatch):
    monkeypatch.setattr("llmx.runtime.launch.PORT_SECONDS", 0.3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"port is in use: 127.0.0.1:{port}.*another port"):
            bind_address(LaunchConfig(), Cluster(f"127.0.0.1:{port}", 2, 0))


def test_a_refusal_is_remembered_for_those_that_look_later():
    store = Memory(2)
    store.put("llmx/told/1", "")
    Peers(store, 0, 2).refuse("the data is wrong", 2)
    refusal = json.loads(store.texts["llmx/refusal/0"])
    assert refusal["cause"] == "the data is wrong" and refusal["code"] == 2


def test_a_store_that_does_not_answer_ends_the_process(monkeypatch):
    """Process 0 is stopped: its store takes calls, and answers none."""
    monkeypatch.setattr(agreement, "BEAT_SECONDS", 0.05)
    ended = threading.Event()

    class Stopped(Memory):
        def list(self, folder):
            threading.Event().wait()

    peers = Peers(Stopped(2), 1, 2, silence=0.5)
    monkeypatch.setattr(peers, "end", lambda code, text: (said.append((code, text)), ended.set()))
    said = []
    monkeypatch.setattr(agreement, "_explain_abort", lambda peers: None)
    peers.start()
    assert ended.wait(10)
    assert said[0][0] == exits.AGAIN and "launch.heartbeat_seconds=0.5" in said[0][1]
    peers._over.set()


def test_a_process_that_has_left_is_not_gone(monkeypatch):
    """Process 0 may need a while after the others: it draws, and deletes old checkpoints."""
    monkeypatch.setattr(agreement, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(agreement, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(agreement, "_explain_abort", lambda peers: None)
    store, said = Memory(2), []
    first, second = (Peers(store, index, 2, silence=0.5) for index in range(2))
    for peers in (first, second):
        monkeypatch.setattr(peers, "end", lambda code, text: said.append(text))
    monkeypatch.setattr(first, "refuse", lambda cause, code: said.append(cause))
    first.start()
    second.start()
    with store.changed:
        assert store.changed.wait_for(lambda: "llmx/beat/1" in store.texts, 10)
    time.sleep(0.2)  # process 0 has seen it
    second.close()
    time.sleep(1.0)
    assert not said and [beat["process"] for beat in first.heartbeats()] == [0]
    first.close()


def test_after_going_back_a_request_anywhere_stops_all():
    def work(peers):
        stop = StopSignal(log=lambda text: None)
        stop.join(peers)
        before = stop.asked_anywhere()
        if peers.index == 1:
            stop.request("SIGTERM", exits.AGAIN)
        return before, stop.asked_anywhere(), stop.reason, stop.code

    assert together(3, work) == [(False, True, "SIGTERM", exits.AGAIN)] * 3


def test_a_crash_before_the_processes_have_met_is_told_to_them(monkeypatch):
    met = []
    monkeypatch.setattr(job.Job, "join_by_environment", lambda job: met.append(1))
    early, late = job.Job(log=print), job.Job(log=print)
    monkeypatch.setattr(launch, "start", lambda config: None)
    monkeypatch.setattr(agreement, "explain_abort", lambda *_: None)
    late.join(LaunchConfig())
    for one in (early, late):
        one.tell_crash(RuntimeError, RuntimeError("unforeseen"), None)
        one.tell_crash(SystemExit, SystemExit(2), None)
    assert met == [1]
