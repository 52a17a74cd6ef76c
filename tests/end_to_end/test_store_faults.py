"""Runs in an object store that answers wrongly, late or never: no finished work is lost, and a
start with a healthy store goes on from the newest state."""

import pathlib
import shutil
import subprocess
import sys
import time

import pytest
from support import faulty_store, text_runs

from llmx.data import remote
from llmx.runtime import exits

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

ROOT = pathlib.Path(__file__).parents[2]
STEPS, SECONDS = 10, 300.0
URL = "s3://bucket/runs/a"
CHECKPOINTS = "runs/a/checkpoints/"


@pytest.fixture
def store(tmp_path, monkeypatch):
    for module in ("s3fs", "moto", "flask"):
        pytest.importorskip(module, reason=f"{module} is not installed (extras s3 and test)")
    import s3fs

    text_runs.write_corpus(tmp_path, files=2, words=400)
    with faulty_store.started() as found:
        for name, value in found.environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        s3fs.S3FileSystem.clear_instance_cache()
        yield found
        s3fs.S3FileSystem.clear_instance_cache()


def start(tmp_path, *flags, workdir=URL, quick="pass"):
    """quick: assignments to constants of `mirror`, for waits that a test can take."""
    program = (
        "import sys; from llmx import train; from llmx.data import remote; "
        "from llmx.checkpoint import mirror; remote.PAUSE_SECONDS = 0.1; "
        f"{quick}; sys.exit(train.main())"
    )
    command = [
        sys.executable, "-c", program, "--config", "configs/quickstart.py", "--workdir", workdir,
        f"--config.data.sources=('{tmp_path}/text',)", f"--config.data.cache_dir={tmp_path}/data",
        f"--config.steps={STEPS}", "--config.checkpoint.every=2", "--config.evaluation.every=0",
        "--config.batch.size=2", "--config.batch.sequence_length=32",
        "--config.model.num_layers=1", "--config.model.width=32",
        "--config.metrics.log_every=1", "--config.metrics.progress=plain",
        "--config.sample.max_tokens=4", f"--config.launch.compile_cache={tmp_path}/compiled",
        *flags,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def ended(process):
    said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said


def run(tmp_path, *flags, **options):
    return ended(start(tmp_path, *flags, **options))


def folder(tmp_path):
    return remote.local_place(URL, tmp_path / "home" / ".cache" / "llmx" / "workdirs")


def complete(names):
    """Steps of the checkpoints that are whole in the store."""
    return sorted(
        int(name.split("/")[1]) for name in names
        if name.startswith("checkpoints/") and name.endswith("/commit_success.txt")
    )  # fmt: skip


def wait_for(path, process):
    deadline = time.monotonic() + SECONDS
    while not path.exists():
        assert time.monotonic() < deadline and process.poll() is None, ended(process)
        time.sleep(0.02)


def expected_losses(tmp_path):
    code, said = run(tmp_path, workdir=str(tmp_path / "local"))
    assert code == 0, said
    return text_runs.losses(tmp_path / "local", steps=STEPS)


def losses_there(tmp_path):
    copy = tmp_path / "copy"
    remote.fetch(URL, copy, keep=lambda name: name == "metrics.jsonl")
    return text_runs.losses(copy, steps=STEPS)


RARE = pytest.mark.full_grid  # the others stand for these


@pytest.mark.parametrize("fault", [403, pytest.param("reset", marks=RARE)])
def test_uploads_that_fail_lose_no_checkpoint(tmp_path, store, fault):
    """They fail from the second checkpoint on, and the run is killed: it goes on from the newest
    local checkpoint, without the store's help; what the store lacked is there at the end."""
    whole = expected_losses(tmp_path)

    def refuse(request):
        return fault if request.method == "PUT" and "owner.json" not in request.key else None

    first = start(tmp_path, quick="mirror.RETRY_SECONDS = 1.0")
    wait_for(folder(tmp_path) / "checkpoints" / "2", first)
    store.fault = refuse
    wait_for(folder(tmp_path) / "checkpoints" / "8", first)
    first.kill()
    ended(first)
    store.heal()
    assert max([0, *complete(remote.find(URL))]) < 8
    code, said = run(tmp_path)
    assert code == 0, said
    newest = int(said.split("resumed from checkpoint ")[1].split()[0])
    assert newest >= 8 and "they stay, and are uploaded" in said.replace("\n", " "), said
    assert losses_there(tmp_path) == whole
    assert complete(remote.find(URL))[-1] == STEPS


def _listing(fault):
    return lambda request: fault if request.is_listing else None


def _reading(fault, text):
    return lambda request: fault if request.reads(text) else None


AT_A_START = [
    (_listing("empty"), exits.AGAIN, "lacks owner.json"),
    (_listing(403), exits.REFUSED, "the credentials"),
    (_reading("flip", "checkpoints/"), exits.AGAIN, "run again"),
    (lambda request: 404 if request.method == "PUT" else None, exits.REFUSED, "bucket 'bucket'"),
]
MORE_AT_A_START = [
    (_listing(503), exits.AGAIN, "run again"),
    (_reading("cut", "checkpoints/"), exits.AGAIN, "run again"),
    (_reading("short", "checkpoints/"), exits.AGAIN, "run again"),
    (_reading("flip", "metrics.jsonl"), exits.AGAIN, "run again"),
    (_reading(500, "owner.json"), exits.AGAIN, "cannot be written"),
]


@pytest.mark.parametrize(
    "faults", [AT_A_START, pytest.param(MORE_AT_A_START, marks=RARE)], ids=["few", "more"]
)
def test_a_start_that_the_store_fails_can_be_made_again(tmp_path, store, faults):
    """Each fault at the start: its exit code, and nothing is written or lost."""
    whole = expected_losses(tmp_path)
    code, said = run(tmp_path, f"--config.steps={STEPS - 4}")
    assert code == 0 and f"uploaded to {URL}" in said, said
    before = remote.find(URL)
    shutil.rmtree(folder(tmp_path))  # as on another machine
    for fault, wanted, words in faults:
        store.fault = fault
        code, said = run(tmp_path, quick="from llmx.runtime import ownership; "
                         "ownership.IO_SECONDS = 3.0")  # fmt: skip
        assert code == wanted and words in said, (words, code, said)
        assert URL in said.splitlines()[-1], said
        store.heal()
        assert remote.find(URL).keys() - {"owner.json"} == before.keys()
    code, said = run(tmp_path)
    assert code == 0 and f"resumed from checkpoint {STEPS - 4}" in said, said
    assert losses_there(tmp_path) == whole


@pytest.mark.parametrize(
    "fault", ["never", pytest.param(20.0, marks=RARE), pytest.param(503, marks=RARE)]
)
def test_a_store_that_hangs_delays_no_step(tmp_path, store, fault):
    """From the first upload on: all steps are taken at once, the end waits as long as it is told,
    and the next start uploads."""
    whole = expected_losses(tmp_path)
    first = start(tmp_path, quick="mirror.FINAL_SECONDS = 6.0; mirror.TELL_SECONDS = 2.0")
    wait_for(folder(tmp_path) / "checkpoints", first)
    store.fault = lambda request: fault
    begun = time.monotonic()
    wait_for(folder(tmp_path) / "checkpoints" / str(STEPS), first)
    assert time.monotonic() - begun < 60
    code, said = ended(first)
    assert code == exits.AGAIN, said
    assert "has not taken" in said and "waiting for it" in said, said
    assert "the same command on this machine uploads it" in said.replace("\n", " "), said
    assert text_runs.losses(folder(tmp_path), steps=STEPS) == whole
    store.heal()
    code, said = run(tmp_path)
    assert code == 0 and f"resumed from checkpoint {STEPS}" in said, said
    assert losses_there(tmp_path) == whole and complete(remote.find(URL))[-1] == STEPS


@pytest.mark.parametrize(
    "fault", ["flip", pytest.param("cut", marks=RARE), pytest.param(500, marks=RARE)]
)
def test_shards_and_text_of_a_store_that_fails_train_no_step(tmp_path, store, fault):
    """Neither from a copy that is not what was written, nor with finished shards thrown away."""
    code = subprocess.run(
        [sys.executable, "-m", "llmx.data", "--source", f"{tmp_path}/text", "--output",
         "s3://bucket/tokens"], cwd=ROOT, check=False, timeout=SECONDS,
    ).returncode  # fmt: skip
    assert code == 0
    flags = ("--config.data.sources=('shards:s3://bucket/tokens',)",)
    store.fault = lambda request: fault if request.reads(".tokens") else None
    code, said = run(tmp_path, *flags, workdir=str(tmp_path / "a"))
    assert code == exits.AGAIN and "s3://bucket/tokens" in said.splitlines()[-1], said
    assert not (tmp_path / "a" / "metrics.jsonl").exists()
    store.heal()
    code, said = run(tmp_path, *flags, workdir=str(tmp_path / "a"))
    assert code == 0, said
    assert text_runs.losses(tmp_path / "a", steps=STEPS)
