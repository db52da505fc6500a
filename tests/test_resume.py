"""A run that was killed and resumed ends as one that never stopped. Damaged and foreign files are refused."""

import gzip
import json
import os
import pickle
import random
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from common import TINY, scalars
from test_replay_data import logged_rows, write_file

import eaudecql_atari
import eaudedqn_atari
import eaudesac_mujoco
import polyprune_cql_atari
import polyprune_dqn_atari
import polyprune_sac_mujoco

TOTAL, PERIOD = 1_200, 250
SHORT = f"--total-timesteps {TOTAL} --checkpoint-period {PERIOD} --batch-size 8"
ATARI = f"{SHORT} --env-id Pong --horizon 170 --features 2 3 3 4 --eval-episodes 2"
ONLINE = f"{ATARI} --learning-starts 100 --gradient-period 6 --target-period 60 --buffer-size 300 --epsilon-duration 400"
OFFLINE = f"{ATARI} --dataset-dir data --files-in-memory 2 --epoch-steps 400 --target-period 60"
MUJOCO = f"{SHORT} --env-id Hopper --learning-starts 100 --critic-features 8 --actor-features 8 --buffer-size 300"
MUJOCO += " --pruning-period 60 --actor-final-sparsity 0.5 --eval-period 400 --eval-episodes 2 --policy-delay 7"
POPULATION = " --n-networks 3 --tournament-size 2"
FLAGS = {
    eaudedqn_atari: ONLINE + POPULATION,
    polyprune_dqn_atari: ONLINE + " --pruning-period 50 --record-rows 200 --record-dir",
    eaudecql_atari: OFFLINE + POPULATION,
    polyprune_cql_atari: OFFLINE + " --pruning-period 50",
    eaudesac_mujoco: MUJOCO + POPULATION,
    polyprune_sac_mujoco: MUJOCO,
}
SCRIPTS = pytest.mark.parametrize("script", FLAGS, ids=lambda script: script.__name__)


def flags(script, name):
    """Of a run in the folder `name`, which has recordings beside it if the script makes any."""
    record_dir = f" {name}_data" if script is polyprune_dqn_atari else ""
    return f"{FLAGS[script]}{record_dir} --runs-dir {name}"


def start(folder, script, flags, strike=""):
    """The script as a process of its own, which gets a signal on the way if there is a `strike`."""
    strike = [str(Path(__file__).with_name("strike.py")), *strike.split()] if strike else []
    command = [sys.executable, *strike, script.__file__, *flags.split()]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)


def checkpoint(run):
    return pickle.loads((run / "checkpoint").read_bytes())


def run_until_the_end(folder, script, name, strikes):
    """Start, be struck, resume, be struck, ..., resume, finish. (signal, moment, step it goes on from) of each strike."""
    arguments = flags(script, name)
    for signum, moment, step in strikes:
        result = start(folder, script, arguments, f"{signum} {moment}")
        (run,) = (folder / name).iterdir()
        assert result.returncode == {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}[signum], result.stderr
        assert checkpoint(run)["step"] == step
        arguments = f"--resume {run.relative_to(folder)}"
        if signum != "SIGKILL":
            assert f"Interrupted after {step:,} steps" in result.stdout
            assert result.stderr == ""
            assert f"python {script.__file__} {arguments}\n" in result.stdout
            assert not list(run.glob("*.tmp"))
    result = start(folder, script, arguments)
    assert (result.returncode, result.stderr) == (0, "")
    (run,) = (folder / name).iterdir()
    assert ("resumed after" in result.stdout) == bool(strikes)
    return run


def contents(run):
    """All that a run leaves behind, but for its speed and its place."""
    saved = checkpoint(run)
    del saved["args"], saved["files"], saved["latest"]["charts/SPS"]
    if "recorder" in saved:
        del saved["recorder"]["folder"]
    curves = {tag: values for tag, values in scalars(run).items() if tag != "charts/SPS"}
    recording = sorted(Path(f"{run.parent}_data").glob("*"))
    return saved, curves, (run / "policy.npz").read_bytes(), [gzip.open(path).read() for path in recording]


def assert_same_contents(run, other):
    left, left_tree = jax.tree.flatten(contents(run))
    right, right_tree = jax.tree.flatten(contents(other))
    assert left_tree == right_tree
    for x, y in zip(left, right):
        assert type(x) is type(y)
        np.testing.assert_array_equal(x, y)


@SCRIPTS
def test_a_run_that_was_struck_ends_as_one_that_was_not(script, tmp_path):
    (tmp_path / "data").mkdir()
    for number in range(5):
        rows, _ = logged_rows(60, seed=number)
        write_file(tmp_path / "data", number, [(frame, action % 6, *rest) for frame, action, *rest in rows])
    rng = random.Random(script.__name__)
    saves = f"{script.__name__}.saves"  # called at the end of each step, before it is saved
    steps = [rng.randrange(PERIOD + 1, 2 * PERIOD), rng.randrange(1, PERIOD), rng.randrange(1, PERIOD)]
    kills = [
        ("SIGKILL", f"{saves} {steps[0]}", PERIOD),
        ("SIGKILL", "hashlib.file_digest 2", PERIOD),  # the policy is written, the checkpoint is half written
        ("SIGKILL", "pathlib.replace 4", 2 * PERIOD),  # the second checkpoint is written, but still has another name
        ("SIGKILL", f"{saves} {steps[1]}", 2 * PERIOD),
    ]
    stops = [
        ("SIGTERM", f"{saves} {PERIOD + steps[2]}", PERIOD + steps[2]),
        ("SIGINT", f"{saves} 1", PERIOD + steps[2] + 1),
        ("SIGTERM", f"{saves} {PERIOD}", 2 * PERIOD + steps[2] + 1),
    ]
    with ThreadPoolExecutor(2) as pool:  # two processes side by side
        runs = [("killed", kills), ("stopped", stops), ("never", [])]
        futures = [pool.submit(run_until_the_end, tmp_path, script, *run) for run in runs]
        killed, stopped, never = [future.result() for future in futures]
    curves = scalars(never)
    assert curves["sparsity/target"][-1][1] > 0
    assert len(curves["sparsity/target"]) > 15
    assert len(curves["charts/SPS"]) == 1
    assert any(tag.startswith("losses/") and values[0][0] == 1_000 for tag, values in curves.items())
    assert not (never / "replay").exists()
    assert_same_contents(killed, never)
    assert_same_contents(stopped, never)
