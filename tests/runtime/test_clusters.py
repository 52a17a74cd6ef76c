"""Processes found by what launchers and schedulers leave in the environment."""

import dataclasses
import importlib.util
import os
import re
import shutil
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from llmx.runtime import clusters, launch
from llmx.runtime.launch import LaunchConfig

ROOT = Path(__file__).parents[2]
GIVEN = {"LLMX_COORDINATOR": "h:1", "LLMX_NUM_PROCESSES": "4", "LLMX_PROCESS_ID": "3"}
ADDRESS = {"LLMX_COORDINATOR": "h:1"}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "n[1-4]",
}
TWO_A_NODE = SLURM | {"SLURM_STEP_NUM_NODES": "2", "SLURM_LOCALID": "1"}
MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
MPI_5 = {name: value for name, value in MPI.items() if "orte" not in name}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
JOBSET = POD | {"LLMX_COORDINATOR": "llmx-hosts-0-0.llmx:8476", "LLMX_NUM_PROCESSES": "2"}
ALONE, BY_JAX = None, (None, None, None, None)
# (config, environment, Cluster without found_by, a word of found_by)
FOUND = {
    "nothing": ({}, {}, ALONE, ""),
    "auto": ({"coordinator": "auto"}, {}, BY_JAX, "JAX"),
    "config": (
        {"coordinator": "c:2", "num_processes": 2, "process_id": 1},
        GIVEN | SLURM,
        ("c:2", 2, 1, None),
        "the config",
    ),
    "config of one": (
        {"coordinator": "c:2", "num_processes": 1, "process_id": 0},
        GIVEN,
        ALONE,
        "",
    ),
    "config says none": ({"coordinator": "none"}, GIVEN | SLURM, ALONE, ""),
    "environment": ({}, GIVEN, ("h:1", 4, 3, None), "LLMX_COORDINATOR"),
    "environment of one": (
        {},
        GIVEN | {"LLMX_NUM_PROCESSES": "1", "LLMX_PROCESS_ID": "0"},
        ALONE,
        "",
    ),
    "environment says none": ({}, SLURM | {"LLMX_COORDINATOR": "none"}, ALONE, ""),
    "environment before slurm": ({}, GIVEN | SLURM, ("h:1", 4, 3, None), "LLMX_COORDINATOR"),
    "environment before mpi": ({}, GIVEN | MPI, ("h:1", 4, 3, None), "LLMX_COORDINATOR"),
    "slurm": ({}, SLURM, ("n1:61441", 4, 2, None), "SLURM (job 4097)"),
    "slurm, one host": ({}, SLURM | {"SLURM_STEP_NODELIST": "n7"}, ("n7:61441", 4, 2, None), ""),
    "slurm, a list": (
        {},
        SLURM | {"SLURM_STEP_NODELIST": "gpu[007,9-11]-ib,b2"},
        ("gpu007-ib:61441", 4, 2, None),
        "",
    ),
    "slurm, hosts without numbers": (
        {},
        SLURM | {"SLURM_STEP_NODELIST": "alpha,beta[1-3]"},
        ("alpha:61441", 4, 2, None),
        "",
    ),
    "slurm, a port": ({}, SLURM | {"JAX_COORDINATOR_PORT": "99"}, ("n1:99", 4, 2, None), ""),
    "slurm, an address": ({}, SLURM | ADDRESS, ("h:1", 4, 2, None), "LLMX_COORDINATOR and SLURM"),
    "slurm, two on a node": ({}, TWO_A_NODE, ("n1:61441", 4, 2, (1,)), "SLURM"),
    "slurm, two on a node, bound": (
        {},
        TWO_A_NODE | {"CUDA_VISIBLE_DEVICES": "1"},
        ("n1:61441", 4, 2, None),
        "SLURM",
    ),
    "slurm, two on a node that see all": (
        {},
        TWO_A_NODE | {"CUDA_VISIBLE_DEVICES": "0,1"},
        ("n1:61441", 4, 2, (1,)),
        "SLURM",
    ),
    "slurm, a smaller step": (
        {},
        SLURM | {"SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "3"},
        ("n1:61441", 3, 2, None),
        "SLURM",
    ),
    "slurm of one": ({}, SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, ALONE, ""),
    "sbatch of one": ({}, {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "3"}, ALONE, ""),
    "open mpi": ({}, MPI, ("10.96.0.1:62624", 2, 1, None), "Open MPI"),
    "open mpi, ipv6": (
        {},
        MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp6://[fe80::b9b,2620:10d::2]:43370"},
        ("[fe80::b9b]:62624", 2, 1, None),
        "Open MPI",
    ),
    "open mpi, two on a host": (
        {},
        MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"},
        ("10.96.0.1:62624", 2, 1, (1,)),
        "Open MPI",
    ),
    # mpirun in an allocation: srun started its daemons, not these processes.
    "open mpi in slurm": ({}, MPI | SLURM, ("10.96.0.1:62624", 2, 1, None), "Open MPI"),
    "open mpi 5, an address": ({}, MPI_5 | ADDRESS, ("h:1", 2, 1, None), "and Open MPI"),
    "open mpi of one": (
        {},
        MPI_5 | {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        ALONE,
        "",
    ),
    "tpu pod": ({}, {"TPU_WORKER_HOSTNAMES": "a,b"}, BY_JAX, "Cloud TPU"),
    "tpu host": ({}, {"TPU_WORKER_HOSTNAMES": "localhost"}, ALONE, ""),
    "tpu slices": ({}, {"MEGASCALE_NUM_SLICES": "2"}, BY_JAX, "Cloud TPU"),
    "tpu pod of a jobset": ({}, POD | {"TPU_WORKER_HOSTNAMES": "a,b"}, BY_JAX, "Cloud TPU"),
    "jobset": ({}, JOBSET, ("llmx-hosts-0-0.llmx:8476", 2, 1, None), "Kubernetes"),
    "jobset of one": (
        {},
        JOBSET | {"LLMX_NUM_PROCESSES": "1", "JOB_COMPLETION_INDEX": "0"},
        ALONE,
        "",
    ),
    "a pod without index": ({}, {"KUBERNETES_SERVICE_HOST": "k"}, ALONE, ""),
}


@pytest.mark.parametrize("case", FOUND)
def test_processes_are_found(case):
    config, environment, want, found_by = FOUND[case]
    cluster = launch.find_cluster(LaunchConfig(**config), environment)
    assert (cluster and dataclasses.astuple(cluster)[:-1]) == want
    assert cluster is None or found_by in cluster.found_by


# (environment, words of the error)
WRONG = {
    "half": ({k: GIVEN[k] for k in list(GIVEN)[:2]}, "LLMX_PROCESS_ID not set"),
    "address alone": (ADDRESS, "LLMX_NUM_PROCESSES, LLMX_PROCESS_ID not set"),
    "no address": ({"LLMX_PROCESS_ID": "0"}, "LLMX_COORDINATOR, LLMX_NUM_PROCESSES not set"),
    "out of range": (GIVEN | {"LLMX_PROCESS_ID": "4"}, "LLMX_PROCESS_ID=4 is not in 0..3"),
    "negative": (GIVEN | {"LLMX_PROCESS_ID": "-1"}, "LLMX_PROCESS_ID='-1' is not a number"),
    "no number": (GIVEN | {"LLMX_NUM_PROCESSES": "four"}, "LLMX_NUM_PROCESSES='four'"),
    "no processes": (GIVEN | {"LLMX_NUM_PROCESSES": "0"}, "LLMX_NUM_PROCESSES=0"),
    "empty": (GIVEN | {"LLMX_NUM_PROCESSES": ""}, "LLMX_NUM_PROCESSES=''"),
    "other digits": (GIVEN | {"LLMX_PROCESS_ID": "²"}, "LLMX_PROCESS_ID='²'"),
    "no port": (GIVEN | {"LLMX_COORDINATOR": "host"}, "LLMX_COORDINATOR='host' is not host:port"),
    "no host": (GIVEN | {"LLMX_COORDINATOR": ":80"}, "LLMX_COORDINATOR=':80' is not host:port"),
    "no such port": (GIVEN | {"LLMX_COORDINATOR": "h:70000"}, "'h:70000' is not host:port"),
    "sbatch without srun": ({"SLURM_NTASKS": "4"}, "start it with srun, or set LLMX_COORDINATOR"),
    "sbatch with an address": (ADDRESS | {"SLURM_NTASKS": "4"}, "start it with srun"),
    "slurm without its number": (
        {k: v for k, v in SLURM.items() if k != "SLURM_PROCID"},
        "SLURM_PROCID is not set",
    ),
    "slurm without a job": ({k: v for k, v in SLURM.items() if "JOB" not in k}, "SLURM_JOB_ID"),
    "slurm out of range": (SLURM | {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 is not in 0..3"),
    "slurm's count": (SLURM | {"SLURM_NTASKS": "many"}, "SLURM_NTASKS='many' is not a number"),
    "slurm's hosts": (SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST='' names no host"),
    "a port of no number": (SLURM | {"JAX_COORDINATOR_PORT": "x"}, "JAX_COORDINATOR_PORT='x'"),
    "open mpi out of range": (MPI | {"OMPI_COMM_WORLD_RANK": "2"}, "is not in 0..1"),
    "open mpi without rank": ({"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_RANK is not set"),
    "open mpi 5": (MPI_5, "LLMX_COORDINATOR not set: Open MPI does not say it"),
    "slices of no number": ({"MEGASCALE_NUM_SLICES": "two"}, "MEGASCALE_NUM_SLICES='two'"),
    "a slice out of range": (
        {"MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "2"},
        "MEGASCALE_SLICE_ID=2 is not in 0..1",
    ),
    "a tpu worker out of range": (
        {"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "5"},
        "TPU_WORKER_ID=5 is not in 0..1",
    ),
    "a job that is no jobset": (POD, "LLMX_COORDINATOR, LLMX_NUM_PROCESSES not set: Kubernetes"),
    "a jobset out of range": (JOBSET | {"JOB_COMPLETION_INDEX": "2"}, "LLMX_PROCESS_ID=2"),
    "a jobset without its coordinator": (JOBSET | {"LLMX_COORDINATOR": ":8476"}, "':8476'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_environment_is_named(case):
    environment, words = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(words)):
        clusters.find(environment)


def test_with_the_kubernetes_package_jax_asks_the_cluster(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert clusters.find(POD).found_by == "Kubernetes"
    assert clusters.find(JOBSET).coordinator == JOBSET["LLMX_COORDINATOR"]


@pytest.mark.parametrize(
    ("cluster", "count", "want"),
    [
        (
            clusters.Cluster("n1:61441", 4, 0, None, "SLURM (job 1)"),
            0,
            "launch: 4 processes, found by SLURM (job 1); the coordinator is n1:61441",
        ),
        (clusters.Cluster(found_by="Cloud TPU"), 16, "launch: 16 processes, found by Cloud TPU"),
    ],
)
def test_one_line_says_who_was_found(cluster, count, want):
    assert clusters.describe(cluster, count) == want


def test_train_refuses_a_wrong_environment_before_anything_heavy(tmp_path):
    command = [sys.executable, "-m", "llmx.train", "--config", "configs/quickstart.py"]
    command += ["--workdir", str(tmp_path / "run")]
    environment = os.environ | {"SLURM_NTASKS": "2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and "start it with srun" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "run").exists()


def test_a_coordinator_by_its_own_name_is_reached_from_other_hosts(monkeypatch):
    """Debian has 127.0.1.1 for a machine's own name: bound there, no other host reaches it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", port))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    bound = launch.bind_address(LaunchConfig(), clusters.Cluster(f"node1:{port}", 2, 0))
    assert bound == f"[::]:{port}"


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("mpirun"), reason="Open MPI is not installed")
def test_open_mpi_starts_processes_that_compute_together():
    code = """
        import jax
        from jax.experimental import multihost_utils
        from llmx.runtime import launch
        launch.start(launch.LaunchConfig(platform="cpu", cpu_devices=1, compile_cache=""))
        total = multihost_utils.process_allgather(jax.process_index() + 1).sum()
        print(f"sum {total} of {jax.device_count()} devices", flush=True)
    """
    command = ["mpirun", "-n", "2", "--allow-run-as-root", "--oversubscribe", sys.executable, "-c"]
    done = subprocess.run(
        [*command, textwrap.dedent(code)],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("sum 3 of 2 devices") == 2
    assert done.stderr.count("launch: 2 processes, found by Open MPI") == 1
