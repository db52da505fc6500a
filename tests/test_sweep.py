"""Sweeps: the same command again and again ends as one that was left alone."""

import contextlib
import fcntl
import importlib
import itertools
import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import tyro
from common import LIMIT, final_weights

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))

import sweep  # noqa: E402

SHORT = "--total-timesteps 2000 --learning-starts 100 --checkpoint-period 100 --batch-size 16 --pruning-period 50"
SHORT += " --critic-features 8 --actor-features 8 --eval-period 1000 --eval-episodes 1"
STUDY = f"""
env_ids = ["InvertedPendulum"]
seeds = [1, 2]
flags = "{SHORT}"

[variants]
dense = "polyprune_sac_mujoco.py --final-sparsity 0"
eaude = "eaudesac_mujoco.py --max-speed 0.1"
oracle = "polyprune_sac_mujoco.py --final-sparsity {{eaude}}"
"""
FAILING = """
env_ids = ["InvertedPendulum", "NoSuchTask"]
seeds = [1]
flags = "--total-timesteps 110 --learning-starts 100 --batch-size 16 --critic-features 8 --actor-features 8"

[variants]
dense = "polyprune_sac_mujoco.py --final-sparsity 0"
"""


def write_study(folder, text=STUDY):
    folder.mkdir(exist_ok=True)
    (folder / "tiny.toml").write_text(text)
    return folder


def command(folder, *flags):
    return [sys.executable, ROOT / "benchmark" / "sweep.py", folder / "tiny.toml", "--runs-dir", folder, *flags]


def run_sweep(folder, *flags):
    return subprocess.run(command(folder, *flags), capture_output=True, text=True, check=False, timeout=LIMIT)


def wait_until(condition):
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def write_run(folder, sparsity, step=100, total=100, files=()):
    """What a run leaves: `folder` is the sweep's, in which the script has made its own."""
    own = folder / "own"
    own.mkdir(parents=True)
    about = {"step": step, "args": {"total_timesteps": total}, "sparsity": sparsity}
    np.savez(own / "policy.npz", about=json.dumps(about))
    for name in ("args.json", *files):
        (own / name).write_text("{}")


def results(folder):
    """{name of a run: weights of its policy}"""
    return {path.parent.parent.name: final_weights(path.parent) for path in folder.glob("tiny/*/*/policy.npz")}


def processes_of(folder):
    """[(pid, name of the run)] of the scripts that work on a study."""
    found, parents = [], {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words, pid = path.read_bytes().decode().split("\0"), int(path.parent.name)
            parents[pid] = int(path.with_name("stat").read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        names = [word.removeprefix(f"{folder}/tiny/").split("/")[0] for word in words if f"{folder}/tiny/" in word]
        if names and "sweep.py" not in words[1]:
            found.append((pid, names[0]))
    # The import of glfw starts a child, which looks as its parent does until it has become another program.
    return [(pid, name) for pid, name in found if (parents[pid], name) not in found]


def checkpoints(folder):
    """Of all runs: a newer one is another one."""
    found = set()
    for path in folder.glob("tiny/*/*/checkpoint.npz"):
        with contextlib.suppress(FileNotFoundError):  # its run has ended meanwhile
            found.add((path, path.stat().st_mtime_ns))
    return found


def wait_for_checkpoints(process, folder, n_checkpoints):
    """Until a sweep is at work and so many new ones were seen, or it has ended."""
    seen = checkpoints(folder)
    enough = len(seen) + n_checkpoints

    def is_time():
        names = [name for _, name in processes_of(folder)]
        assert len(set(names)) == len(names)  # no run twice
        seen.update(checkpoints(folder))
        return process.poll() is not None or (names and len(seen) >= enough)

    wait_until(is_time)


@pytest.mark.slow
def test_a_sweep_that_was_killed_again_and_again_ends_as_one_that_was_not(tmp_path):
    alone, killed, rng = write_study(tmp_path / "alone"), write_study(tmp_path / "killed"), random.Random(0)
    result = run_sweep(alone, "--jobs", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("6 done\n")
    n_kills = 0
    for n_checkpoints in (0, 1, 0, 3, 8, 2, 15, 6, 11, 4):  # by then it is killed; 0: while JAX still starts
        process = subprocess.Popen(command(killed, "--jobs", "2"), stdout=subprocess.DEVNULL)
        wait_for_checkpoints(process, killed, n_checkpoints)
        n_kills += process.poll() is None
        process.kill()
        process.wait()
        if rng.random() < 0.7:  # else they go on without the sweep, and the next one leaves them alone
            for pid, _ in processes_of(killed):
                os.kill(pid, signal.SIGKILL)
    assert n_kills > 1
    wait_until(lambda: not processes_of(killed))
    assert run_sweep(killed, "--jobs", "2").stdout.endswith("6 done\n")
    expected, found = results(alone), results(killed)
    assert len(expected) == 6
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        assert weights.keys() == found[name].keys()
        assert all((found[name][tensor] == x).all() for tensor, x in weights.items()), name


@pytest.mark.slow
def test_ctrl_c_stops_all_runs_with_a_checkpoint_and_a_failure_stops_no_other(tmp_path):
    folder = write_study(tmp_path / "a study", FAILING.replace("110", "10_000_000"))
    with subprocess.Popen(command(folder, "--jobs", "2"), stdout=subprocess.PIPE, text=True) as process:
        failed = folder / "tiny" / "NoSuchTask__polyprune_sac_mujoco__dense__1" / "exit_code"
        wait_until(lambda: failed.exists() and list(folder.glob("tiny/Inv*/*/events*")))
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=LIMIT)[0]
    assert "1 failed, 1 interrupted" in output
    assert re.search("^failed: NoSuchTask.*: error: .*'NoSuchTask'", output, re.MULTILINE)
    assert list(folder.glob("tiny/Inv*/*/checkpoint.npz"))
    _, last = output.strip().split("the same command finishes what is missing: python ")
    assert shlex.split(last) == [str(word) for word in command(folder, "--jobs", "2")[1:]]  # there is a space in it
    other = write_study(folder, FAILING)
    result = run_sweep(other)
    assert result.returncode == 2
    assert re.search("was started with other flags\n  then: .*10_000_000.*\n  now:  .*110 ", result.stderr)


# ---- Made-up runs with known answers ----
def test_an_oracle_gets_the_last_sparsity_of_the_same_task_and_seed(tmp_path):
    """0.1 x task + 0.0123 x seed, and on MuJoCo the mean of the two critics: the actor does not count."""
    text = STUDY.replace('["InvertedPendulum"]', '["Ant", "Hopper"]').replace(SHORT, "")
    folder = write_study(tmp_path / "study", text)
    (tmp_path / "study" / "dqn.toml").write_text(text.replace("_sac_mujoco", "_dqn_atari").replace("sac_", "dqn_"))
    for (i, env), seed in itertools.product(enumerate(("Ant", "Hopper")), (1, 2)):
        sparsity = 0.1 + 0.1 * i + 0.0123 * seed
        critics = {"actor": 0.99, "critic_0": sparsity - 0.05, "critic_1": sparsity + 0.05}
        write_run(folder / "tiny" / f"{env}__eaudesac_mujoco__eaude__{seed}", critics)
        write_run(folder / "dqn" / f"{env}__eaudedqn_mujoco__eaude__{seed}", {"target": sparsity})
        write_run(folder / "tiny" / f"{env}__polyprune_sac_mujoco__dense__{seed}", {"critic_0": 0.0, "critic_1": 0.0})
    for name in ("tiny", "dqn"):
        runs = sweep.load_study(folder / f"{name}.toml", folder)
        oracles = [run.command() for run in runs if "__oracle__" in run.folder.name]
        found = [re.search(r"--env-id (\w+) --seed (\d) --final-sparsity (\S+)$", line).groups() for line in oracles]
        expected = {"Ant 1": "0.1123", "Hopper 1": "0.2123", "Ant 2": "0.1246", "Hopper 2": "0.2246"}
        assert {f"{env} {seed}": sparsity for env, seed, sparsity in found} == expected


def test_what_is_not_finished_is_tried_again_failed_runs_too(tmp_path, monkeypatch, capsys):
    folder = write_study(tmp_path / "study", STUDY.replace("[1, 2]", "[1, 2, 3, 4, 5, 6]"))
    names = [run.folder.name for run in sweep.load_study(folder / "tiny.toml", folder) if "dense" in run.folder.name]
    done, failed, killed, stopped, running, _ = [folder / "tiny" / name for name in names]  # nothing of the last
    write_run(done, {"critic_0": 0.0})
    write_run(failed, {"critic_0": 0.0}, step=50)  # a policy of half of the run
    write_run(killed, {"critic_0": 0.0}, files=["checkpoint.npz"])  # in its very last step
    write_run(stopped, {"critic_0": 0.0}, step=50, files=["checkpoint.npz"])
    running.mkdir()
    for path, code in ((done, "0"), (failed, "1"), (stopped, "143")):
        (path / "exit_code").write_text(code)
    for path in (done, failed, killed, stopped, running):
        (path / "lock").touch()
        (path / "log").write_text("on 1 cores\nFinished after 100 steps")  # words are no proof
    waiting = []
    monkeypatch.setattr(sweep, "run_here", lambda runs, jobs: waiting.extend(run.folder for run in runs))
    with open(running / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        states = [sweep.state_of(folder / "tiny" / name) for name in names]
        sweep.main(sweep.Args(folder / "tiny.toml", only=("*__dense__*",), runs_dir=folder))
    assert states == ["done", "failed", "interrupted", "interrupted", "running", "missing"]
    assert waiting == [failed, killed, stopped, folder / "tiny" / names[-1]]
    (failed / "command").write_text("polyprune_sac_mujoco.py --env-id InvertedPendulum --seed 2")
    with pytest.raises(SystemExit):  # begun with other flags
        sweep.main(sweep.Args(folder / "tiny.toml", only=("*__dense__2",), runs_dir=folder))
    assert f"{failed.name} was started with other flags\n  then: " in capsys.readouterr().err


def test_a_checkpoint_is_gone_on_with_and_a_run_without_one_starts_again(tmp_path, monkeypatch):
    folder = write_study(tmp_path / "study")
    with_one, without, *_ = sweep.load_study(folder / "tiny.toml", folder)
    write_run(with_one.folder, {}, step=50, files=["checkpoint.npz"])
    write_run(without.folder, {}, step=50)
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, env, **_: started.append((words, env)))
    monkeypatch.setenv("XLA_FLAGS", "--of-the-person")
    sweep.start(with_one, [0])
    sweep.start(without, [0, 1])
    (first, first_env), (second, second_env) = started
    assert first[:3] == ["taskset", "-c", "0"]
    assert first[-2:] == ["--resume", str(with_one.folder / "own")]
    assert second[:3] == ["taskset", "-c", "0,1"]
    assert second[-2:] == ["--runs-dir", str(without.folder)]
    assert not (without.folder / "own").exists()
    assert first_env["XLA_FLAGS"] == "--of-the-person --xla_cpu_multi_thread_eigen=false"
    assert second_env["XLA_FLAGS"] == "--of-the-person"


@pytest.mark.parametrize(("jobs", "setting"), [(1, None), (2, "false")])
def test_runs_that_share_a_gpu_do_not_take_all_its_memory(jobs, setting, monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(sweep, "note_signals", list)
    sweep.run_here([], jobs)
    assert os.environ.get("XLA_PYTHON_CLIENT_PREALLOCATE") == setting


def test_runs_at_a_time_have_cores_of_their_own(tmp_path, monkeypatch):
    started = []

    class Process:  # some of them end sooner than others
        def __init__(self, cores):
            self.cores, self.returncode, self.polls_left = cores, None, (5, 1, 1, 2)[len(started)]

        def poll(self):
            self.polls_left -= 1
            self.returncode = None if self.polls_left else 0
            return self.returncode

    def start(run, cores):
        run.folder.mkdir(parents=True)
        assert len(cores) == 2
        assert not any(set(cores) & set(x.cores) for x in started if x.returncode is None)
        started.append(Process(cores))
        return started[-1]

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    monkeypatch.setattr(sweep, "note_signals", list)
    monkeypatch.setattr(sweep, "start", start)
    monkeypatch.setattr(sweep.time, "sleep", lambda _: None)
    sweep.run_here(sweep.load_study(write_study(tmp_path / "study") / "tiny.toml", tmp_path), 2)
    assert len(started) == 4  # the oracles wait for what has not ended well
    assert [path.read_text() for path in tmp_path.glob("tiny/*/exit_code")] == ["0"] * 4


def test_a_dry_run_shows_every_command_and_does_nothing(tmp_path):
    folder = write_study(tmp_path / "study")
    output = run_sweep(folder, "--dry-run").stdout.splitlines()
    assert len(output) == 6
    assert output[1] == f"missing: python eaudesac_mujoco.py --env-id InvertedPendulum --seed 1 {SHORT} --max-speed 0.1"
    assert output[-1].endswith("--seed 2 " + SHORT + " --final-sparsity {eaude}")
    assert [path.name for path in folder.iterdir()] == ["tiny.toml"]
    chosen = run_sweep(folder, "--dry-run", "--only", "*__eaude__1", "*__dense__2").stdout.splitlines()
    assert chosen == [output[1], output[3]]


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (STUDY, ["--jobs", "999"], "--jobs 999: each run needs a core of its own"),
        (STUDY, ["--jobs", "0"], "--jobs must be at least 1, not 0"),
        (STUDY.replace("[1, 2]", "[]"), [], "tiny.toml has no runs"),
        (STUDY, ["--only", "*__other__*"], "tiny.toml has no runs *__other__*"),
        ("seeds = [1]", [], "tiny.toml is not a study: it has no 'variants'"),
        (STUDY.replace("{eaude}", "{edaue}"), [], "tiny.toml is not a study: it has no 'edaue'"),
        ("seeds = [", [], "tiny.toml is not a study: "),
        (None, [], "tiny.toml: No such file or directory"),
    ],
)
def test_wrong_input_gets_one_message(text, flags, message, tmp_path):
    folder = write_study(tmp_path / "study", text or "")
    if text is None:
        (folder / "tiny.toml").unlink()
    result = run_sweep(folder, *flags)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_damaged_policy_is_said(tmp_path):
    folder = write_study(tmp_path / "study")
    run = folder / "tiny" / "InvertedPendulum__eaudesac_mujoco__eaude__1"
    write_run(run, {})
    (run / "own" / "policy.npz").write_bytes((run / "own" / "policy.npz").read_bytes()[:-30])
    result = run_sweep(folder, "--dry-run")
    assert result.returncode == 2
    assert result.stderr == f"error: {run}/own/policy.npz is damaged; without its folder the run starts again\n"


def test_the_environment_is_filled_into_all_flags(tmp_path):
    text = STUDY.replace(SHORT, "--shared {env_id}").replace("--max-speed 0.1", "--own {env_id}")
    _, eaude, *_ = sweep.load_study(write_study(tmp_path / "study", text) / "tiny.toml", tmp_path)
    flags = "--env-id InvertedPendulum --seed 1 --shared InvertedPendulum"
    assert eaude.command() == f"eaudesac_mujoco.py {flags} --own InvertedPendulum"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmark" / "studies").glob("*.toml")), ids=lambda path: path.stem)
def test_every_command_of_every_study_parses(path, tmp_path):
    for run in sweep.load_study(path, tmp_path):
        name, *flags = re.sub(r"{\w+}", "0.5", run.template).split()
        script = importlib.import_module(name.removesuffix(".py"))
        args = tyro.cli(script.Args, args=flags)
        script.check_args(args)
        assert f"{args.env_id}__{script.__name__}__" in str(run.folder)
