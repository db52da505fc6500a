"""Sweeps: the same command again and again ends as one that was left alone."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tyro
from common import final_weights

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
    return subprocess.run(command(folder, *flags), capture_output=True, text=True, check=False)


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


@pytest.mark.slow
def test_a_sweep_that_was_killed_again_and_again_ends_as_one_that_was_not(tmp_path):
    alone, killed, rng = write_study(tmp_path / "alone"), write_study(tmp_path / "killed"), random.Random(0)
    result = run_sweep(alone, "--jobs", "2")
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.endswith("6 done\n")
    n_kills = 0
    while sum(sweep.is_done(folder) for folder in killed.glob("tiny/*")) < 6:
        process = subprocess.Popen(command(killed, "--jobs", "2"), stdout=subprocess.DEVNULL)
        seen, n_checkpoints = checkpoints(killed), rng.randrange(16)  # by then it is killed; 0: while JAX still starts
        enough = len(seen) + n_checkpoints
        while process.poll() is None and (not processes_of(killed) or len(seen) < enough):
            names = [name for _, name in processes_of(killed)]
            assert len(set(names)) == len(names)  # no run twice
            seen |= checkpoints(killed)
            time.sleep(0.02)
        if process.poll() is None:
            process.kill()
            process.wait()
            n_kills += 1
            if rng.random() < 0.7:  # else they go on without the sweep, and the next one leaves them alone
                for pid, _ in processes_of(killed):
                    os.kill(pid, signal.SIGKILL)
    assert n_kills > 2
    assert "6 done" in run_sweep(killed, "--jobs", "2").stdout
    expected, found = results(alone), results(killed)
    assert len(expected) == 6
    assert found.keys() == expected.keys()
    for name, weights in expected.items():
        assert weights.keys() == found[name].keys()
        assert all((found[name][tensor] == x).all() for tensor, x in weights.items()), name


@pytest.mark.slow
def test_ctrl_c_stops_all_runs_with_a_checkpoint_and_a_failure_stops_no_other(tmp_path):
    folder = write_study(tmp_path / "study", FAILING.replace("110", "100_000"))
    with subprocess.Popen(command(folder, "--jobs", "2"), stdout=subprocess.PIPE, text=True) as process:
        log = folder / "tiny" / "InvertedPendulum__polyprune_sac_mujoco__dense__1" / "log"
        failed = folder / "tiny" / "NoSuchTask__polyprune_sac_mujoco__dense__1" / "exit_code"
        while not (failed.exists() and log.exists() and "Run folder" in log.read_text()):
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=100)[0]
    assert "1 failed, 1 interrupted" in output
    assert re.search("^failed: NoSuchTask.*: error: unknown MuJoCo task 'NoSuchTask'", output, re.MULTILINE)
    assert "the same command finishes what is missing" in output
    assert list(folder.glob("tiny/Inv*/*/checkpoint.npz"))
    other = write_study(folder, FAILING)
    result = run_sweep(other)
    assert result.returncode == 2
    assert re.search("was started with other flags\n  then: .*100_000.*\n  now:  .*110 ", result.stderr)


def test_a_dry_run_shows_every_command_and_does_nothing(tmp_path):
    folder = write_study(tmp_path / "study")
    output = run_sweep(folder, "--dry-run").stdout.splitlines()
    assert len(output) == 6
    assert output[1] == f"missing: python eaudesac_mujoco.py --env-id InvertedPendulum --seed 1 {SHORT} --max-speed 0.1"
    assert output[-1].endswith("--seed 2 " + SHORT + " --final-sparsity {eaude}")
    assert [path.name for path in folder.iterdir()] == ["tiny.toml"]


@pytest.mark.parametrize(
    ("text", "flags", "message"),
    [
        (STUDY, ["--jobs", "999"], "--jobs 999: each run needs a core of its own"),
        (STUDY, ["--jobs", "0"], "--jobs must be at least 1, not 0"),
        (STUDY.replace("[1, 2]", "[]"), [], "tiny.toml has no runs"),
        ("seeds = [1]", [], "is not a study: KeyError('variants')"),
        ("seeds = [", [], "is not a study: TOMLDecodeError"),
    ],
)
def test_wrong_input_gets_one_message(text, flags, message, tmp_path):
    result = run_sweep(write_study(tmp_path / "study", text), *flags)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_environment_is_filled_into_all_flags_and_a_missing_sparsity_is_said(tmp_path):
    text = STUDY.replace(SHORT, "--shared {env_id}").replace("--max-speed 0.1", "--own {env_id}")
    folder = write_study(tmp_path / "study", text)
    flags = "--env-id InvertedPendulum --seed 1 --shared InvertedPendulum"
    first = run_sweep(folder, "--dry-run").stdout.splitlines()[1]
    assert first == f"missing: python eaudesac_mujoco.py {flags} --own InvertedPendulum"
    eaude = folder / "tiny" / "InvertedPendulum__eaudesac_mujoco__eaude__1"
    eaude.mkdir(parents=True)
    (eaude / "log").write_text("on 1 cores\n50/50 steps\nFinished after 50 steps")
    result = run_sweep(folder, "--dry-run")
    assert result.returncode == 2
    assert f"{eaude.name}, whose sparsity InvertedPendulum__polyprune_sac_mujoco__oracle__1 takes" in result.stderr


@pytest.mark.parametrize("path", sorted((ROOT / "benchmark" / "studies").glob("*.toml")), ids=lambda path: path.stem)
def test_every_command_of_every_study_parses(path, tmp_path):
    import importlib

    for run in sweep.load_study(path, tmp_path):
        name, *flags = re.sub(r"{\w+}", "0.5", run.template).split()
        script = importlib.import_module(name.removesuffix(".py"))
        args = tyro.cli(script.Args, args=flags)
        script.check_args(args)
        assert f"{args.env_id}__{script.__name__}__" in str(run.folder)
