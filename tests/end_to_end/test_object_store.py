"""A run whose work directory is in an object store (moto's S3 server), killed and continued."""

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from support import text_runs

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("processes")]

ROOT = pathlib.Path(__file__).parents[2]
STEPS = 12
SECONDS = 600.0


@pytest.fixture
def environment(tmp_path, monkeypatch):
    """The variables of a process that uses a new, empty S3 with the bucket `bucket`."""
    for module in ("s3fs", "moto", "flask"):
        pytest.importorskip(module, reason=f"{module} is not installed (extras s3 and test)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    values = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1", "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path / "home"),
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        import s3fs

        deadline = time.monotonic() + 120
        while True:
            assert time.monotonic() < deadline and server.poll() is None
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        # A file system of an earlier test in this process would ask that test's server.
        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem().mkdir("bucket")
        yield dict(os.environ)
        s3fs.S3FileSystem.clear_instance_cache()
    finally:
        server.kill()
        server.wait()


def start_two(tmp_path, workdir, environment):
    """Two processes of a run, as on two hosts: each has a home of its own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"LLMX_COORDINATOR": f"127.0.0.1:{port}", "LLMX_NUM_PROCESSES": "2",
             "JAX_NUM_CPU_DEVICES": "2"}  # fmt: skip
    flags = ("--config.mesh.fsdp=2", "--config.mesh.data=2", "--config.sharding.layout=zero3",
             "--config.batch.size=4", "--config.metrics.progress=plain")  # fmt: skip
    return [
        start(
            tmp_path, workdir,
            environment | place | {"LLMX_PROCESS_ID": str(i), "HOME": f"{tmp_path}/home{i}"},
            flags=flags, start_new_session=True,
        )
        for i in range(2)
    ]  # fmt: skip


def wait_for(files, path, processes):
    """Until there is something at `path` in the store."""
    deadline = time.monotonic() + SECONDS
    while True:
        files.invalidate_cache()
        if files.exists(path):
            return
        assert time.monotonic() < deadline, path
        for process in processes:
            assert process.poll() is None, ended(process)
        time.sleep(0.05)


def test_two_processes_on_two_disks_are_killed_and_continue_bit_for_bit(tmp_path, environment):
    """Both are killed after a checkpoint, then one of them while the next is uploaded."""
    import s3fs

    text_runs.write_corpus(tmp_path, files=3, words=400)
    for process in start_two(tmp_path, str(tmp_path / "local"), environment):
        code, said = ended(process)
        assert code == 0, said
    url, files = "s3://bucket/runs/two", s3fs.S3FileSystem()
    checkpoints = "bucket/runs/two/checkpoints"
    both = start_two(tmp_path, url, environment)
    wait_for(files, f"{checkpoints}/4/commit_success.txt", both)
    for process in both:
        process.kill()
    for process in both:
        assert ended(process)[0] == -signal.SIGKILL
    for home in (0, 1):  # as on other machines
        shutil.rmtree(tmp_path / f"home{home}" / ".cache" / "llmx" / "workdirs")
    first, second = both = start_two(tmp_path, url, environment)
    wait_for(files, f"{checkpoints}/8/state", both)
    second.kill()
    assert ended(second)[0] == -signal.SIGKILL
    code, said = ended(first)
    assert "resumed from checkpoint" in said, said
    # Nothing is lost where the other was done before the signal came.
    assert code != 0 or "everything is saved, and the run is done" in said, said
    both = start_two(tmp_path, url, environment)
    for process, (code, said) in zip(both, map(ended, both), strict=True):
        assert code == 0, said
        if process is both[0]:
            assert "resumed from checkpoint" in said and f"uploaded to {url}" in said, said
    files.invalidate_cache()
    files.get("bucket/runs/two/metrics.jsonl", str(tmp_path / "copy" / "metrics.jsonl"))
    whole = text_runs.losses(tmp_path / "local", steps=STEPS)
    assert text_runs.losses(tmp_path / "copy", steps=STEPS) == whole
    assert not files.exists("bucket/runs/two/owner.json")
    launches = {path.split("x")[1] for path in files.find(f"{checkpoints}/{STEPS}/state")
                if "/ocdbt.process_" in path}  # fmt: skip
    assert len(launches) == 1, launches
    # Each disk had its own shards alone, and has none now.
    held = [p for i in (0, 1) for p in (tmp_path / f"home{i}").rglob("ocdbt.process_*")]
    assert held == []
    shown = subprocess.run(
        [sys.executable, "-m", "llmx.checkpoint", "verify", url, "--all"], cwd=ROOT,
        env=environment, capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    assert shown.returncode == 0 and f"{STEPS}" in shown.stdout, shown.stderr


def start(tmp_path, workdir, environment, flags=(), **options):
    command = [
        sys.executable, "-m", "llmx.train", "--config", "configs/quickstart.py",
        "--workdir", workdir, f"--config.data.sources=('{tmp_path}/text',)",
        f"--config.data.cache_dir={tmp_path}/data", f"--config.steps={STEPS}",
        "--config.checkpoint.every=4", "--config.evaluation.every=0", "--config.batch.size=2",
        "--config.batch.sequence_length=32", "--config.model.num_layers=1",
        "--config.metrics.log_every=1", "--config.sample.max_tokens=4", *flags,
    ]  # fmt: skip
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, **options,
    )  # fmt: skip


def ended(process):
    said, _ = process.communicate(timeout=SECONDS)
    return process.returncode, said


@pytest.mark.full_grid  # two processes do, above
def test_a_killed_run_continues_from_the_store_with_the_same_losses(tmp_path, environment):
    import s3fs

    text_runs.write_corpus(tmp_path, files=3, words=400)
    code, said = ended(start(tmp_path, str(tmp_path / "local"), environment))
    assert code == 0, said
    url, files = "s3://bucket/runs/a", s3fs.S3FileSystem()
    first = start(tmp_path, url, environment)
    marker, deadline = "bucket/runs/a/checkpoints/4/commit_success.txt", time.monotonic() + SECONDS
    while True:
        files.invalidate_cache()
        if files.exists(marker):
            break
        assert first.poll() is None and time.monotonic() < deadline, ended(first)
        time.sleep(0.1)
    # While it lives no other run may have the directory.
    first.send_signal(signal.SIGSTOP)
    refused, said = ended(start(tmp_path, url, environment))
    assert refused == 2 and f"{url} is in use by process {first.pid}" in said, said
    first.kill()
    assert ended(first)[0] == -signal.SIGKILL
    shutil.rmtree(tmp_path / "home" / ".cache" / "llmx" / "workdirs")  # as on another machine
    code, said = ended(start(tmp_path, url, environment))
    assert code == 0, said
    assert f"resumed from checkpoint {4}" in said or "resumed from checkpoint 8" in said, said
    assert f"uploaded to {url}" in said
    shutil.rmtree(tmp_path / "home" / ".cache" / "llmx" / "workdirs")
    files.invalidate_cache()
    files.get("bucket/runs/a/metrics.jsonl", str(tmp_path / "copy" / "metrics.jsonl"))
    whole = text_runs.losses(tmp_path / "local", steps=STEPS)
    assert text_runs.losses(tmp_path / "copy", steps=STEPS) == whole
    assert not files.exists("bucket/runs/a/owner.json")
    shown = subprocess.run(
        [sys.executable, "-m", "llmx.checkpoint", "verify", url, "--all"], cwd=ROOT,
        env=environment, capture_output=True, text=True, check=False, timeout=SECONDS,
    )  # fmt: skip
    assert shown.returncode == 0 and f"{STEPS}" in shown.stdout, shown.stderr


@pytest.mark.full_grid  # checkpoint/test_copies.py starts one
def test_a_run_starts_from_a_store_as_from_local_folders(tmp_path, environment):
    """A work directory, one checkpoint of it, and its export to Hugging Face."""
    import s3fs

    text_runs.write_corpus(tmp_path, files=3, words=400)
    old, exported = tmp_path / "old", tmp_path / "exported"
    code, said = ended(start(tmp_path, str(old), environment))
    assert code == 0, said
    command = [sys.executable, "-m", "llmx.convert", "--workdir", old, "--to-hf", exported]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=SECONDS)
    files = s3fs.S3FileSystem()
    files.put(f"{old}/", "bucket/old/", recursive=True)
    files.put(f"{exported}/", "bucket/exported/", recursive=True)
    for place in ("old", "old@4", "exported"):
        found = []
        for lead in (f"{tmp_path}/", "s3://bucket/"):
            workdir = tmp_path / f"new{len(list(tmp_path.iterdir()))}"
            process = start(
                tmp_path, str(workdir), environment,
                flags=(f"--config.start_from={lead}{place}", "--config.steps=2"),
            )  # fmt: skip
            code, said = ended(process)
            assert code == 0 and f"starting with the parameters of {lead}" in said, said
            found.append(text_runs.losses(workdir, steps=2))
        assert found[0] == found[1], place
    code, said = ended(
        start(tmp_path, str(tmp_path / "none"), environment,
              flags=("--config.start_from=s3://bucket/missing",))
    )  # fmt: skip
    assert code == 2 and "start_from=s3://bucket/missing does not exist" in said, said
    wrong = environment | {"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}
    code, said = ended(
        start(tmp_path, str(tmp_path / "none"), wrong,
              flags=("--config.start_from=s3://bucket/old",))
    )  # fmt: skip
    assert code == 75 and "start_from='s3://bucket/old' cannot be listed (" in said, said
