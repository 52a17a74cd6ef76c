"""Launching: flags that XLA knows, processes found, signals that stop a run, hangs that end."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import pytest

from llmx.runtime import exits, launch, signals
from llmx.runtime.launch import LaunchConfig

ROOT = Path(__file__).parents[2]
CLUSTER = [sys.executable, "scripts/local_cluster.py"]
JOIN = """
import jax, sys
from llmx.runtime import launch
launch.start(launch.LaunchConfig(platform="cpu", compile_cache="", heartbeat_seconds=10))
"""


def run(command, *, timeout=60, **environment):
    """The finished command; environment variables given as None are taken out."""
    merged = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **environment}
    return subprocess.run(
        command,
        cwd=ROOT,
        env={name: value for name, value in merged.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def python(code, *arguments):
    return [sys.executable, "-c", textwrap.dedent(code), *arguments]


def wait_for(path, seconds=60):
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.01)


BAD = [
    (LaunchConfig(platform="npu"), "use one of cpu, gpu, tpu"),
    (LaunchConfig(cpu_devices=-1), "launch.cpu_devices=-1"),
    (LaunchConfig(platform="gpu", cpu_devices=8), "use 0, or platform cpu"),
    (LaunchConfig(heartbeat_seconds=1), "use 30"),
    (LaunchConfig(watchdog_seconds=-5), "0 = watchdog.step_factor"),
    (LaunchConfig(coordinator="host", num_processes=2, process_id=0), "not host:port"),
    (LaunchConfig(coordinator="host:1"), "launch.num_processes=0"),
    (LaunchConfig(coordinator="host:1", num_processes=2), "launch.process_id=-1 is not in 0..1"),
    (LaunchConfig(num_processes=2), "set launch.coordinator=host:port"),
]


@pytest.mark.parametrize(("config", "words"), BAD)
def test_problems_name_value_and_remedy(config, words):
    assert any(words in text for text in launch.problems(config))
    with pytest.raises(ValueError, match="launch"):
        launch.start(config)


def test_all_problems_are_reported_together():
    config = LaunchConfig(platform="npu", cpu_devices=-1, heartbeat_seconds=0, num_processes=3)
    assert len(launch.problems(config)) == 4
    assert launch.problems(LaunchConfig()) == []


def test_flags_of_the_user_win():
    wanted = {"xla_a": "1", "xla_b": "2"}
    assert launch.merge_flags("", wanted) == "--xla_a=1 --xla_b=2"
    assert launch.merge_flags("--xla_b=9 --xla_c", wanted) == "--xla_b=9 --xla_c --xla_a=1"


def test_passes_that_the_user_disables_are_added_to_ours():
    ours = {"xla_disable_hlo_passes": "one"}
    assert launch.merge_flags("", ours) == "--xla_disable_hlo_passes=one"
    merged = launch.merge_flags("--xla_disable_hlo_passes=two,three --xla_c", ours)
    assert merged == "--xla_c --xla_disable_hlo_passes=two,three,one"
    assert launch.merge_flags(merged, ours) == merged


def test_xla_knows_every_flag():
    every = " ".join(launch.merge_flags("", flags) for flags in launch.XLA_FLAGS.values())
    compute = python("import jax; print(jax.jit(lambda x: x + 1)(1))")
    known = run(compute, XLA_FLAGS=every)
    assert (known.returncode, known.stdout) == (0, "2\n"), known.stderr
    unknown = run(compute, XLA_FLAGS=every + " --xla_gpu_enable_async_collectives=true")
    assert unknown.returncode != 0 and "Unknown flag" in unknown.stderr


def test_start_sets_up_and_may_be_repeated(tmp_path):
    code = """
        import os, sys
        from llmx.runtime import launch, signals
        config = launch.LaunchConfig(platform="cpu", cpu_devices=3, compile_cache=sys.argv[1])
        launch.start(config)
        import jax
        assert jax.device_count() == launch.device_count(config) == 3
        launch.start(config)
        assert jax.config.jax_compilation_cache_dir == sys.argv[1]
        assert "concurrency_optimized_scheduler=false" in os.environ["XLA_FLAGS"]
        assert not jax.distributed.is_initialized()
        launch.log("by process 0")
        try:
            launch.start(launch.LaunchConfig(platform="cpu", cpu_devices=4))
        except RuntimeError:
            print("refused")
    """
    done = run(python(code, str(tmp_path / "cache")))
    assert (done.returncode, done.stdout) == (0, "by process 0\nrefused\n"), done.stderr


def test_one_process_on_one_device_gets_no_flags_and_no_cache():
    code = """
        import os, jax
        from llmx.runtime import launch, signals
        launch.start(launch.LaunchConfig(platform="cpu", compile_cache=""))
        print(os.environ["XLA_FLAGS"], jax.config.jax_compilation_cache_dir, jax.device_count())
    """
    assert run(python(code)).stdout == " None 1\n"


def test_a_platform_that_is_not_there_is_named():
    code = """
        from llmx.runtime import launch, signals
        config = launch.LaunchConfig(platform="tpu", compile_cache="")
        launch.start(config)
        launch.device_count(config)
    """
    done = run(python(code), JAX_PLATFORMS=None)
    assert "ValueError: launch.platform='tpu' does not start" in done.stderr
    assert "install jax[cuda13] or jax[tpu]" in done.stderr


PLUGIN = """
import jax
def initialize():
    if "cpu" not in (jax.config.jax_platforms or ""):
        raise RuntimeError("no driver is here")
"""


@pytest.mark.skipif(launch.has_accelerator(), reason="this machine's accelerator is used")
def test_without_accelerators_plugins_print_nothing(tmp_path):
    """Compilers for other machines are installed as plugins, which fail without a driver."""
    plugin = tmp_path / "jax_plugins" / "broken"
    plugin.mkdir(parents=True)
    (plugin / "__init__.py").write_text(PLUGIN)
    path = f"{tmp_path}{os.pathsep}{ROOT}"
    code = """
        import jax
        from llmx.runtime import launch
        launch.start(launch.LaunchConfig(compile_cache=""))
        print(launch.device_count(launch.LaunchConfig()), jax.default_backend())
    """
    done = run(python(code), JAX_PLATFORMS=None, PYTHONPATH=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1 cpu\n", "")
    plain = run(python("import jax; jax.devices()"), JAX_PLATFORMS=None, PYTHONPATH=path)
    assert "no driver is here" in plain.stderr


def test_the_config_and_the_environment_choose_the_platform_first():
    code = """
        import jax, sys
        from llmx.runtime import launch
        platform = launch.choose_platform(launch.LaunchConfig(platform=sys.argv[1]))
        print(platform, jax.config.jax_platforms)
    """
    assert run(python(code, "tpu"), JAX_PLATFORMS="cpu").stdout == "tpu tpu\n"
    assert run(python(code, ""), JAX_PLATFORMS="cuda").stdout == "gpu cuda\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_to_stop(number):
    said = []
    before = signal.getsignal(number)
    with signals.StopSignal(log=said.append) as stop:
        assert not stop.agreed(1)
        os.kill(os.getpid(), number)
        deadline = time.monotonic() + 10
        while not stop.agreed(2) or not said:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert stop.agreed(3)
    assert signal.Signals(number).name in said[0]
    assert signal.getsignal(number) is before
    assert signal.set_wakeup_fd(-1) == -1


def test_the_second_interrupt_exits_at_once_even_inside_a_computation(tmp_path):
    code = """
        import sys, pathlib, jax
        from llmx.runtime import launch, signals
        endless = jax.jit(lambda x: jax.lax.while_loop(lambda x: x > 0, lambda x: x + 1 - 1, x))
        endless = endless.lower(1.0).compile()
        with signals.StopSignal(log=launch.log):
            pathlib.Path(sys.argv[1]).touch()
            endless(1.0).block_until_ready()
    """
    ready = tmp_path / "ready"
    child = subprocess.Popen(python(code, str(ready)), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(ready)
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        assert "SIGINT: stopping after this step" in child.stdout.readline()
        assert child.poll() is None
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=10) == exits.INTERRUPTED
    finally:
        child.kill()
        child.wait()


def test_local_cluster_gives_each_process_its_place():
    code = "import os; print(*(os.environ[n] for n in ('LLMX_PROCESS_ID', 'LLMX_NUM_PROCESSES')))"
    done = run([*CLUSTER, "-n", "3", "--", *python(code)])
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 3", "[1] 1 3", "[2] 2 3"]


def test_local_cluster_explains_itself():
    assert "llmx.train" in run([*CLUSTER, "--help"]).stdout
    bad = run([*CLUSTER, "-n", "0", "--", "true"])
    assert bad.returncode == 2 and "use at least 1" in bad.stderr


def test_local_cluster_passes_signals_on(tmp_path):
    code = """
        import os, signal, sys, time, pathlib
        rank = os.environ["LLMX_PROCESS_ID"]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(20 + int(rank)))
        pathlib.Path(sys.argv[1], rank).touch()
        time.sleep(60)
    """
    child = subprocess.Popen([*CLUSTER, "-n", "2", "--", *python(code, str(tmp_path))], cwd=ROOT)
    for rank in "01":
        wait_for(tmp_path / rank)
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=20) in (20, 21)


@pytest.mark.slow
def test_local_cluster_ends_all_when_one_fails():
    code = "import os, sys, time; sys.exit(7) if os.environ['LLMX_PROCESS_ID'] == '1' else 0;"
    began = time.monotonic()
    done = run([*CLUSTER, "-n", "3", "--", *python(code + "time.sleep(100)")])
    assert done.returncode == 7 and time.monotonic() - began < 30


@pytest.mark.slow
def test_processes_compute_together():
    # A line is one write: Gloo prints to the same stdout meanwhile, from threads of its own.
    code = JOIN + textwrap.dedent("""
        from jax.experimental import multihost_utils
        total = multihost_utils.process_allgather(jax.process_index() + 1).sum()
        print(f"sum {total}\\n", end="", flush=True)
        launch.log("only the first says so")
        counts = jax.device_count(), launch.device_count(launch.LaunchConfig())
        print("devices {} {}\\n".format(*counts), end="")
    """)
    done = run([*CLUSTER, "-n", "3", "--devices-per-process", "2", "--", *python(code)])
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "sum" in line) == [
        "[1] sum 6",
        "[2] sum 6",
        "sum 6",
    ]
    assert "devices 6 6" in done.stdout
    assert (done.stdout + done.stderr).count("only the first says so") == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_stops_all_at_one_step(tmp_path, number):
    code = textwrap.dedent("""
        import jax, os, pathlib, sys, time
        from jax.experimental import multihost_utils
        from llmx.runtime import launch
        from llmx.runtime.job import Job
        with Job(log=launch.log) as job:
            job.join(launch.LaunchConfig(platform="cpu", compile_cache=""))
            stop, step = job.stop, 0
            stop.start()
            while step < 2000 and not stop.agreed(step):
                multihost_utils.process_allgather(step)
                step += 1
                time.sleep(0.01)
                if step == 5 and jax.process_index() == 1:
                    os.kill(os.getpid(), int(sys.argv[1]))
        pathlib.Path(sys.argv[2], str(jax.process_index())).write_text(str(step))
    """)
    arguments = [str(int(number)), str(tmp_path)]
    done = run([*CLUSTER, "-n", "2", "--", *python(code, *arguments)])
    assert done.returncode == 0, done.stdout + done.stderr
    stopped = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    assert stopped[0] == stopped[1] and 5 <= stopped[0] < 2000
    assert f"all processes stop at step {stopped[0]}" in done.stdout
    assert signal.Signals(number).name in done.stdout


def test_importing_starts_no_backend():
    code = """
        import llmx.runtime.launch, jax
        jax.config.update("jax_num_cpu_devices", 5)  # raises once a backend runs
        assert jax.device_count() == 5
    """
    assert run(python(code)).returncode == 0
    assert jax.device_count() == 8  # nor did these tests change their own


def test_compiler_options_are_typed():
    config = launch.LaunchConfig(compiler_options=("xla_a=true", "xla_b=12", "xla_c=x=y"))
    assert not launch.problems(config)
    assert launch.compiler_options(config) == {"xla_a": True, "xla_b": 12, "xla_c": "x=y"}


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("8", 8), ("a", "a")]
)
def test_values_of_flags(text, value):
    assert launch.option_value(text) == value and type(launch.option_value(text)) is type(value)


def test_ctrl_c_among_the_imports_ends_in_silence(tmp_path):
    """They take seconds, and there is nothing to say yet."""
    (tmp_path / "jax.py").write_text(
        "import time\nprint('importing', flush=True)\ntime.sleep(60)\n"
    )
    program = (  # a shell's background job ignores SIGINT
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('llmx.train', run_name='__main__')"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", program], text=True, cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert child.stdout.readline() == "importing\n"
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=30) == ("", "")
    assert child.returncode == -signal.SIGINT  # 130 in a shell
