"""One run per work directory: races, deaths, suspensions, other machines, damaged files."""

import itertools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
import types

import pytest

from llmx.runtime import exits, ownership

ROOT = pathlib.Path(__file__).parents[2]
TTL = 2.0  # seconds; renewals each 0.4

HOLD = """
    import sys, time
    from llmx.runtime import ownership
    with ownership.take(sys.argv[1], log=print, ttl=float(sys.argv[2])) as lease:
        print("taken", flush=True)
        for line in sys.stdin:
            try:
                lease.check()
                print("mine", flush=True)
            except ownership.Lost as lost:
                print("lost", lost.code, lost, flush=True)
"""


def python(code: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


@pytest.fixture
def workdir(tmp_path):
    return str(tmp_path / "run")


@pytest.fixture
def holder(workdir):
    """Another process that holds the directory."""
    process = subprocess.Popen(
        python(HOLD, workdir, str(TTL)), cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "taken\n"
    yield process
    process.kill()
    process.wait()


def ask(process) -> str:
    """What `check` says in the process."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


def file(workdir) -> pathlib.Path:
    return pathlib.Path(workdir, ownership.FILE)


def move_elsewhere(monkeypatch):
    """From here on owners are of another machine."""
    monkeypatch.setattr(ownership, "machine", lambda: ("another boot", "pid:[1]"))


def test_held_renewed_and_given_free(workdir):
    with ownership.take(workdir, log=print, ttl=TTL) as lease:
        first = json.loads(file(workdir).read_text())
        assert first["pid"] == os.getpid() and first["host"] and first["started"]
        time.sleep(2 * TTL)
        lease.poll()
        lease.check()
        assert json.loads(file(workdir).read_text())["heartbeat"] >= 3
        with pytest.raises(ValueError, match="in use") as refused:
            ownership.take(workdir, log=print, ttl=TTL)
        words = (f"process {os.getpid()} on {first['host']}", first["started"], "last heartbeat",
                 f"`kill {os.getpid()}`", "--workdir")  # fmt: skip
        assert all(word in str(refused.value) for word in words), refused.value
    assert os.listdir(workdir) == []
    ownership.take(workdir, log=print).release()


def test_of_several_starts_exactly_one_wins(workdir):
    """Fifty rounds: threads that start together, on what a dead owner left or on nothing."""
    dead = subprocess.Popen(["true"])
    dead.wait()
    left_behind = ownership.own_record(TTL) | {"pid": dead.pid}
    for attempt in range(50):
        folder = f"{workdir}/{attempt}"
        os.makedirs(folder)
        if attempt % 2:
            file(folder).write_text(json.dumps(left_behind))
        barrier, won, refused = threading.Barrier(4), [], []

        def start(folder=folder, barrier=barrier, won=won, refused=refused):
            barrier.wait()
            try:
                won.append(ownership.take(folder, log=lambda _: None))
            except ValueError as error:
                refused.append(str(error))

        threads = [threading.Thread(target=start) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and len(refused) == 3
        assert all("in use" in text for text in refused)
        won[0].check()
        won[0].release()


def test_processes_race_too(workdir):
    """Two processes start at the same moment, again and again."""
    code = """
        import sys, time
        from llmx.runtime import ownership
        import tensorstore
        print("ready", flush=True)
        for line in sys.stdin:
            folder, moment = line.split()
            time.sleep(max(0, float(moment) - time.time()))
            try:
                lease = ownership.take(folder, log=lambda _: None)
                print("won", flush=True)
            except ValueError:
                print("refused", flush=True)
    """
    racers = [
        subprocess.Popen(python(code), cwd=ROOT, text=True, stdin=subprocess.PIPE,
                         stdout=subprocess.PIPE)
        for _ in range(2)
    ]  # fmt: skip
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for attempt in range(50):
            moment = time.time() + 0.02
            for racer in racers:
                racer.stdin.write(f"{workdir}/{attempt} {moment}\n")
                racer.stdin.flush()
            said = sorted(racer.stdout.readline() for racer in racers)
            assert said == ["refused\n", "won\n"], attempt
    finally:
        for racer in racers:
            racer.kill()
            racer.wait()


def test_after_kill_9_the_next_start_goes_on_at_once(workdir, holder):
    with pytest.raises(ValueError, match=f"process {holder.pid} on"):
        ownership.take(workdir, log=print)
    holder.kill()
    log = []
    # It is not waited for: a zombie writes nothing any more.
    while ownership.process_start(holder.pid) not in (-1, None):
        time.sleep(0.01)
    begun = time.monotonic()
    ownership.take(workdir, log=log.append).release()
    assert time.monotonic() - begun < 5
    assert f"process {holder.pid}" in log[0] and "has ended" in log[0]


def test_killed_at_any_moment_of_a_renewal(workdir):
    """It leaves neither a lock nor a torn file behind."""
    code = """
        import sys
        from llmx.runtime import ownership
        with ownership.take(sys.argv[1], log=print) as lease:
            print("taken", flush=True)
            while True:
                lease._renew()
    """
    for attempt in range(8):
        process = subprocess.Popen(python(code, workdir), cwd=ROOT, stdout=subprocess.PIPE)
        process.stdout.readline()
        time.sleep(0.001 * attempt)
        process.kill()
        process.wait()
    # What a write that was killed leaves: the next one takes the lock and replaces it.
    pathlib.Path(workdir, f"{ownership.FILE}.__lock").write_text("x" * 5000)
    with ownership.take(workdir, log=print, ttl=TTL) as lease:
        time.sleep(TTL)
        lease.check()
        assert f'"pid": {os.getpid()},' in file(workdir).read_text()
    assert os.listdir(workdir) == []


def test_a_process_id_that_came_again_is_another_process(workdir):
    os.makedirs(workdir)
    record = ownership.own_record(TTL)
    file(workdir).write_text(json.dumps(record | {"process_start": 1}))
    log = []
    ownership.take(workdir, log=log.append).release()
    assert "has ended" in log[0]


def test_elsewhere_a_heartbeat_refuses_and_silence_is_taken_over(workdir, holder, monkeypatch):
    """Whatever the clocks say: only changes count, by one's own clock."""
    move_elsewhere(monkeypatch)
    monkeypatch.setattr(ownership, "clock_text", lambda: "1970-01-01 00:00:00 UTC")
    begun, log = time.monotonic(), []
    with pytest.raises(ValueError, match=f"`kill {holder.pid}` on"):
        ownership.take(workdir, log=log.append, ttl=TTL)
    assert time.monotonic() - begun < 2 * TTL
    assert len(log) == 1 and "watching for a sign of life" in log[0]
    assert ask(holder) == "mine\n"

    holder.send_signal(signal.SIGSTOP)
    log.clear()
    with ownership.take(workdir, log=log.append, ttl=TTL) as lease:
        assert "no sign of life" in log[1]
        holder.send_signal(signal.SIGCONT)
        # The awakened owner finds out before it writes, and leaves the file alone at its end.
        said = ask(holder)
        assert said.startswith(f"lost {exits.REFUSED} {workdir} was taken over by process")
        assert f"process {os.getpid()} on" in said and "suspended" in said
        holder.stdin.close()
        assert holder.wait(20) == 0
        lease.check()
    assert not file(workdir).exists()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": "x"}', "\0" * 100])
def test_a_damaged_file_is_watched_and_replaced(workdir, text):
    os.makedirs(workdir)
    file(workdir).write_text(text)
    log = []
    ownership.take(workdir, log=log.append, ttl=TTL).release()
    assert "an unknown run" in log[0]


@pytest.mark.parametrize("text", ["", '{"token', "[]", "{}"])
def test_a_damaged_file_of_a_living_owner_is_mended(workdir, text):
    """Nobody else has the directory: no run writes such a file."""
    told, log = [], []
    with ownership.take(workdir, log=log.append, on_lost=told.append, ttl=TTL) as lease:
        token = json.loads(file(workdir).read_text())["token"]
        file(workdir).write_text(text)
        lease.check()
        for _ in range(100):
            if file(workdir).read_text().startswith('{\n "token"'):
                break
            time.sleep(0.05)
        assert json.loads(file(workdir).read_text())["token"] == token
        lease.check()
    assert not told and not lease.lost and not file(workdir).exists()
    assert f"{workdir}/{ownership.FILE} is damaged: written anew" in log[0]


def wait_until_lost(lease) -> ownership.Lost:
    for _ in range(100):
        try:
            lease.poll()
        except ownership.Lost as lost:
            assert lease.lost == str(lost)
            with pytest.raises(ownership.Lost):
                lease.check()
            return lost
        time.sleep(0.05)
    raise AssertionError("not noticed")


def test_what_becomes_of_the_directory_is_noticed(tmp_path):
    def vanish(folder):
        os.rename(folder, f"{folder}.away")

    def delete(folder):
        file(folder).unlink()

    def replace(folder):
        file(folder).write_text(json.dumps(ownership.own_record(TTL)))

    for happening, words, code in (
        (vanish, "has vanished", exits.UNSAVED),
        (delete, "is gone", exits.UNSAVED),
        (replace, "taken over by process", exits.REFUSED),
    ):
        folder, told = str(tmp_path / happening.__name__), []
        lease = ownership.take(folder, log=print, on_lost=told.append, ttl=TTL)
        happening(folder)
        lost = wait_until_lost(lease)
        assert words in str(lost) and "run" in str(lost) and lost.code == code
        assert lost in told
        lease.release()
        assert not os.path.exists(folder) or happening is not vanish
    assert file(tmp_path / "replace").exists()


def test_storage_that_fails_for_a_while(workdir, monkeypatch):
    """One line, and renewals go on; a full disk does not take the directory from its owner."""
    log, intact = [], ownership.write
    lease = ownership.take(workdir, log=log.append, ttl=TTL)
    before = file(workdir).stat().st_mtime_ns

    def full(store, record, stamp):
        raise ownership.Unavailable("No space left on device")

    monkeypatch.setattr(ownership, "write", full)
    time.sleep(2 * TTL)
    assert len(log) == 1 and "No space left" in log[0]
    assert file(workdir).stat().st_mtime_ns > before, "another machine would see no sign of life"
    lease.check()
    monkeypatch.setattr(ownership, "write", intact)
    time.sleep(TTL)
    assert len(log) == 2 and "again" in log[1]
    lease.release()
    assert not file(workdir).exists()


def test_a_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "run", "/sys/llmx"):
        with pytest.raises(ValueError, match=r"cannot be written .*name another --workdir"):
            ownership.take(str(folder), log=print)


@pytest.mark.parametrize("how", ["copied", "moved", "mounted twice", "copied, of an old version"])
def test_a_copy_of_a_directory_in_use_is_told_from_it(tmp_path, workdir, holder, monkeypatch, how):
    """The remedy is not to end the other run."""
    other = tmp_path / "other"
    if how == "moved":
        os.rename(workdir, other)
    else:
        shutil.copytree(workdir, other)
    if how == "mounted twice":
        monkeypatch.setattr(os.path, "samefile", lambda a, b: True)
    if how == "copied, of an old version":
        found = json.loads(file(other).read_text())
        del found["workdir"]
        file(other).write_text(json.dumps(found))
    is_copy = how == "copied"
    words = f"copied from {workdir}, .*delete owner.json in" if is_copy else "is in use by .*kill"
    with pytest.raises(ValueError, match=words):
        ownership.take(str(other), log=print, ttl=TTL)
    if is_copy:
        (tmp_path / "link").symlink_to(workdir)
        with pytest.raises(ValueError, match="is in use by"):
            ownership.take(str(tmp_path / "link"), log=print, ttl=TTL)
        file(other).unlink()  # as it says
        ownership.take(str(other), log=print, ttl=TTL).release()
        assert ask(holder) == "mine\n"


class Refusing:
    """A store that answers a conditional write as one that another was faster than, always."""

    def __init__(self, found=None):
        self._found, self.num_writes = found, 0

    def read(self, name):
        state = "missing" if self._found is None else "value"
        value = json.dumps(self._found).encode()
        stamp = types.SimpleNamespace(generation=b"1")
        return self._answer(types.SimpleNamespace(state=state, value=value, stamp=stamp))

    def write(self, name, text, if_equal):
        self.num_writes += 1
        return self._answer(types.SimpleNamespace(generation=b""))

    def _answer(self, what):
        return types.SimpleNamespace(result=lambda timeout: what)


@pytest.mark.parametrize("found", ["nothing", "dead owner"])
def test_a_store_that_takes_no_write_is_not_asked_for_ever(monkeypatch, found):
    """As where its bucket does not exist."""
    left = None
    if found == "dead owner":
        left = ownership.own_record(TTL) | {"process_start": 1}
    store = Refusing(left)
    monkeypatch.setattr(ownership, "open_store", lambda workdir: store)
    with pytest.raises(ValueError, match=r"s3://nobucket/a cannot be written .*bucket 'nobucket'"):
        ownership.take("s3://nobucket/a", log=print, ttl=TTL)
    assert store.num_writes == 2


def test_starts_that_are_always_too_late_end(workdir, monkeypatch):
    """Whatever the reason, a start does not try for ever."""
    monkeypatch.setattr(ownership, "write", lambda store, record, stamp: None)
    stamps = itertools.count()
    monkeypatch.setattr(ownership, "read", lambda store: (None, b"%d" % next(stamps)))
    with pytest.raises(ValueError, match="cannot be written"):
        ownership.take(workdir, log=print, ttl=TTL)


def test_a_renewal_that_does_not_take_effect_is_told(workdir, monkeypatch):
    log = []
    with ownership.take(workdir, log=log.append, ttl=TTL):
        with monkeypatch.context() as patch:
            patch.setattr(ownership, "write", lambda store, record, stamp: None)
            time.sleep(TTL)
        time.sleep(TTL)
    assert "cannot be renewed" in log[0] and "can be renewed again" in log[1] and len(log) == 2


def test_a_forked_worker_gives_nothing_free(workdir):
    with ownership.take(workdir, log=print) as lease:
        worker = os.fork()
        if worker == 0:
            lease.check()
            lease.release()
            os._exit(0)
        assert os.waitpid(worker, 0)[1] == 0
        lease.check()
        assert file(workdir).exists()


OBJECTS = """
    import http.server, json, sys, urllib.parse

    objects, generation = {}, 0  # {name: (generation, content)}

    class Bucket(http.server.BaseHTTPRequestHandler):
        '''The requests of Cloud Storage's JSON interface that a key-value store makes.'''
        protocol_version = "HTTP/1.1"

        def log_message(self, *_): pass

        def answer(self, code, content=b"", generation=0):
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("x-goog-generation", str(generation))
            self.end_headers()
            self.wfile.write(content)

        def parts(self):
            url = urllib.parse.urlsplit(self.path)
            name = urllib.parse.unquote(url.path.rpartition("/o/")[2])
            return name, dict(urllib.parse.parse_qsl(url.query))

        def do_GET(self):
            found = objects.get(self.parts()[0])
            self.answer(200, found[1], found[0]) if found else self.answer(404)

        def do_POST(self):
            global generation
            content = self.rfile.read(int(self.headers["Content-Length"]))
            _, query = self.parts()
            at = objects.get(query["name"], (0, b""))[0]
            if int(query.get("ifGenerationMatch", at)) != at:
                return self.answer(412)
            generation += 1
            objects[query["name"]] = generation, content
            made = {"name": query["name"], "bucket": "bucket", "generation": str(generation),
                    "metageneration": "1", "id": "1", "size": str(len(content))}
            self.answer(200, json.dumps(made).encode(), generation)

        def do_DELETE(self):
            name, query = self.parts()
            at = objects.get(name, (0, b""))[0]
            if int(query.get("ifGenerationMatch", at)) != at:
                return self.answer(412)
            self.answer(204 if objects.pop(name, None) else 404)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Bucket)
    print(server.server_port, flush=True)
    server.serve_forever()
"""


def test_cloud_storage(tmp_path):
    """TensorStore's own driver of gs://, and a server that answers as Cloud Storage does."""
    server = subprocess.Popen(python(OBJECTS), text=True, stdout=subprocess.PIPE)
    surroundings = os.environ | {
        "TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "token",
    }
    code = """
        import time
        from llmx.runtime import ownership
        take = lambda: ownership.take("gs://bucket/runs/a", log=print, ttl=0.5)
        with take() as lease:
            time.sleep(0.5)
            lease.check()
            try:
                take()
            except ValueError as error:
                print(error)
        with take():
            print("again")
        lease = take()
        ownership.machine = lambda: ("elsewhere", "")
        lease.release = None
        lease._over.set()  # as if it had died
        with take() as other:
            print("silent")
            other.check()
            lease._over.clear()
            try:
                lease.check()
            except ownership.Lost as lost:
                print(lost)
    """
    try:
        done = subprocess.run(
            python(code), env=surroundings, cwd=ROOT, capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
    finally:
        server.kill()
        server.wait()
    assert done.returncode == 0, done.stderr
    refused, again, watching, taken, silent, lost = done.stdout.splitlines()
    assert "gs://bucket/runs/a is in use by process" in refused and again == "again"
    assert "watching" in watching and "no sign of life" in taken and silent == "silent"
    assert "was taken over by process" in lost


def test_an_import_needs_the_directory_too(workdir, holder, monkeypatch, tmp_path):
    from llmx import convert

    source = types.SimpleNamespace(model=convert.config.default().model, shapes={})
    monkeypatch.setattr(convert.hf_reader, "open_checkpoint", lambda _: source)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=f"in use by process {holder.pid} on"):
        convert.from_hf(str(tmp_path), workdir)
    assert os.listdir(workdir) == [ownership.FILE]


def test_a_directory_may_be_named_by_its_parent(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with ownership.take("../run", log=print):
        assert (tmp_path / "run" / ownership.FILE).is_file()
