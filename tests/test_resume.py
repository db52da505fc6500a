"""A run that was killed and resumed ends as one that never stopped. Damaged and foreign files are refused."""

import errno
import gc
import gzip
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from common import TINY, scalars
from probe import Probe
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
ONLINE = f"{ATARI} --learning-starts 100 --gradient-period 6 --target-period 60 --buffer-size 300"
ONLINE += " --epsilon-duration 400"
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


def write_data(folder):
    """Five files of the data set."""
    folder.mkdir()
    for number in range(5):
        rows, _ = logged_rows(60, seed=number)
        write_file(folder, number, [(frame, action % 6, *rest) for frame, action, *rest in rows])


def checkpoint(run):
    return pickle.loads((run / "checkpoint").read_bytes())


def run_until_the_end(folder, script, name, strikes):
    """Start, be struck, resume, be struck, ..., resume, finish. Of a strike: signal, moment, step of the checkpoint."""
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
    return run, re.findall("0:00:00 left, (.*)|^(Target .*)", result.stdout, re.MULTILINE)[-2:]


def contents(run):
    """All that a run leaves behind, but for its speed and its place."""
    saved = checkpoint(run)
    del saved["args"], saved["files"], saved["latest"]["charts/SPS"]
    if "recorder" in saved:
        del saved["recorder"]["folder"]
    curves = {tag: values for tag, values in scalars(run).items() if tag != "charts/SPS"}
    recording = sorted(Path(f"{run.parent}_data").glob("*"))
    return saved, curves, (run / "policy.npz").read_bytes(), [gzip.decompress(path.read_bytes()) for path in recording]


def assert_same_contents(run, other):
    left, left_tree = jax.tree.flatten(contents(run))
    right, right_tree = jax.tree.flatten(contents(other))
    assert left_tree == right_tree
    for x, y in zip(left, right):
        assert type(x) is type(y)
        np.testing.assert_array_equal(x, y)


@SCRIPTS
def test_a_run_that_was_struck_ends_as_one_that_was_not(script, tmp_path):
    write_data(tmp_path / "data")
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
        ("SIGTERM", f"{saves} {997 - PERIOD - steps[2] - 1}", 997),  # what is logged at 1,000 was learned before
    ]
    with ThreadPoolExecutor(2) as pool:  # two processes side by side
        runs = [("killed", kills), ("stopped", stops), ("never", [])]
        futures = [pool.submit(run_until_the_end, tmp_path, script, *run) for run in runs]
        (killed, *summaries), (stopped, *others), (never, *expected) = [future.result() for future in futures]
    assert summaries == others == expected
    assert len(expected[0]) == 2
    curves = scalars(never)
    assert curves["sparsity/target"][-1][1] > 0
    assert len(curves["sparsity/target"]) > 15
    assert len(curves["charts/SPS"]) == 1
    assert any(tag.startswith("losses/") and values[0][0] == 1_000 for tag, values in curves.items())
    assert not (never / "replay").exists()
    assert script is not polyprune_dqn_atari or len(contents(never)[3]) == 4 * 8  # four members, eight episodes
    assert_same_contents(killed, never)
    assert_same_contents(stopped, never)


DATA = dict(features=TINY, batch_size=8, target_period=20, eval_episodes=1, horizon=20, files_in_memory=2)
DATA |= dict(total_timesteps=120, epoch_steps=60)
PONG = dict(env_id="Pong", features=TINY, total_timesteps=400, learning_starts=50, batch_size=8, buffer_size=100)


def stop_after(n_steps, script, monkeypatch, signums=(signal.SIGINT,)):
    """Send signals in that step of the next run."""
    calls, saves = [], script.Run.saves  # called at the end of each step, before it is saved

    def call(run):
        calls.append(run.step)
        if len(calls) == n_steps:
            for signum in signums:
                signal.raise_signal(signum)
        return saves(run)

    monkeypatch.setattr(script.Run, "saves", call)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run of PolyPruneDQN that was stopped."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as monkeypatch:
        stop_after(123, polyprune_dqn_atari, monkeypatch)
        with pytest.raises(SystemExit) as exit_info:
            polyprune_dqn_atari.train(polyprune_dqn_atari.Args(runs_dir=folder, **PONG))
    assert exit_info.value.code == 130
    return next(folder.iterdir())


@pytest.fixture
def run(stopped, tmp_path):
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def assert_refused(script, args, folder, message, capsys):
    """One message, exit code 2, and the folder stays as it was."""
    before = {path: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}
    with pytest.raises(SystemExit) as exit_info:
        script.main(args)
    assert exit_info.value.code == 2
    del exit_info  # its traceback holds on to the lock, which ends with the process at the command line
    gc.collect()
    output = capsys.readouterr()
    assert (output.out, output.err) == ("", f"error: {message}\n")
    assert before == ({path: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {})


def flip(data, position):
    return data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :]


DAMAGES = {
    "empty": lambda data: b"",
    "of one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "short of a byte": lambda data: data[:-1],
    "longer": lambda data: data + b"0",
    "another pickle": lambda data: pickle.dumps({"step": 3}),
    **{f"flipped at {i} / 20": lambda data, i=i: flip(data, i * len(data) // 20) for i in range(20)},
    "flipped at the end": lambda data: flip(data, len(data) - 1),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("name", ["checkpoint", "policy.npz"])
def test_damaged_files_are_refused(name, damage, run, capsys):
    path = run / name
    path.write_bytes(damage(path.read_bytes()))
    script, policy = polyprune_dqn_atari, name == "policy.npz"
    args = script.Args(evaluate=path) if policy else script.Args(resume=run)
    kind = "policy for *_atari.py" if policy else "checkpoint of polyprune_dqn_atari.py"
    assert_refused(script, args, run, f"{path} is not a {kind}, or it is damaged", capsys)


def test_foreign_runs_and_files_are_refused(run, tmp_path, capsys):
    script, nowhere = polyprune_dqn_atari, tmp_path / "nowhere"
    path = run / "checkpoint"
    for other in FLAGS:
        if other is not script:
            message = f"{path} is not a checkpoint of {other.__name__}.py, or it is damaged"
            assert_refused(other, other.Args(resume=run), run, message, capsys)
    message = f"{path} is not a policy for *_atari.py, or it is damaged"
    assert_refused(script, script.Args(evaluate=path), run, message, capsys)
    message = f"{run / 'policy.npz'} is not a policy for *_mujoco.py, or it is damaged"
    assert_refused(eaudesac_mujoco, eaudesac_mujoco.Args(evaluate=run / "policy.npz"), run, message, capsys)
    shutil.copy(run / "policy.npz", path)
    message = f"{path} is not a checkpoint of {script.__name__}.py, or it is damaged"
    assert_refused(script, script.Args(resume=run), run, message, capsys)
    path.unlink()
    message = f"[Errno 2] No such file or directory: '{path}'"
    assert_refused(script, script.Args(resume=run), run, message, capsys)
    message = f"[Errno 2] No such file or directory: '{nowhere}/args.json'"
    assert_refused(script, script.Args(resume=nowhere), nowhere, message, capsys)
    message = f"[Errno 2] No such file or directory: '{nowhere}'"
    assert_refused(script, script.Args(evaluate=nowhere), nowhere, message, capsys)


@pytest.mark.parametrize("pattern", ["replay", "events*"])
def test_missing_and_short_files_are_refused(pattern, run, capsys):
    script, (path,) = polyprune_dqn_atari, run.glob(pattern)
    message = f"{path} is missing, or smaller than when the checkpoint was written"
    path.write_bytes(path.read_bytes()[:-1])
    assert_refused(script, script.Args(resume=run), run, message, capsys)
    path.unlink()
    assert_refused(script, script.Args(resume=run), run, message, capsys)


def test_other_flags_are_refused(run, capsys):
    script = polyprune_dqn_atari
    message = "--resume goes on with the run's own flags: leave out all others"
    assert_refused(script, script.Args(resume=run, seed=2), run, message, capsys)


def test_a_run_has_one_process(run, capsys, monkeypatch):
    script, saves, refused = polyprune_dqn_atari, polyprune_dqn_atari.Run.saves, []

    def resume_as_well(current):
        if not refused:
            with pytest.raises(SystemExit) as exit_info:
                script.train(script.Args(resume=current.folder))
            refused.append((exit_info.value.code, capsys.readouterr().err))
        return saves(current)

    monkeypatch.setattr(script.Run, "saves", resume_as_well)
    script.train(script.Args(resume=run))  # resumed
    assert refused == [(2, f"error: another process is at work on {run}\n")]
    refused.clear()
    new = script.train(script.Args(runs_dir=run, **PONG))  # and from its start
    assert refused == [(2, f"error: another process is at work on {new}\n")]


def test_a_finished_run_says_so_and_stays_as_it_is(run, capsys):
    script = polyprune_dqn_atari
    assert script.train(script.Args(resume=run)) == run
    assert "Finished after 400 steps" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in run.iterdir()}
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(resume=run))
    assert exit_info.value.code is None  # success
    assert capsys.readouterr().out == f"{run} is finished: all its 400 steps are done\n"
    assert before == {path: path.read_bytes() for path in run.iterdir()}


@pytest.mark.parametrize(
    ("signums", "code"),
    [((signal.SIGTERM, signal.SIGTERM), 143), ((signal.SIGINT, signal.SIGTERM), 143)],
    ids=["SIGTERM twice", "SIGINT and SIGTERM"],
)
def test_a_second_sigterm_does_not_keep_the_checkpoint_from_being_written(signums, code, tmp_path, monkeypatch):
    script = polyprune_dqn_atari
    stop_after(60, script, monkeypatch, signums)
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(runs_dir=tmp_path, **PONG))
    assert exit_info.value.code == code
    assert checkpoint(next(tmp_path.iterdir()))["step"] == 60


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, monkeypatch):
    script = polyprune_dqn_atari
    stop_after(60, script, monkeypatch, (signal.SIGINT, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        script.train(script.Args(runs_dir=tmp_path, **PONG))


def test_a_signal_in_the_last_step_changes_nothing(tmp_path, monkeypatch, capsys):
    script = polyprune_dqn_atari
    stop_after(400, script, monkeypatch)
    script.train(script.Args(runs_dir=tmp_path, **PONG))
    assert "Finished after 400 steps" in capsys.readouterr().out


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(tmp_path, monkeypatch, capsys):
    script, dump = polyprune_dqn_atari, pickle.dump

    def dump_half(parts, file, protocol):
        dump(parts, file, protocol)
        if parts["step"] == 200:
            file.truncate(1_000)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pickle, "dump", dump_half)
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.Args(runs_dir=tmp_path, checkpoint_period=100, **PONG))
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"
    monkeypatch.undo()
    (run,) = tmp_path.iterdir()
    assert checkpoint(run)["step"] == 100
    assert script.train(script.Args(resume=run)) == run


def stop_offline(script, folder, monkeypatch):
    """A run that was stopped after 37 of its 120 steps."""
    write_data(folder / "data")
    args = script.Args(runs_dir=folder / "runs", dataset_dir=folder / "data", **DATA)
    with monkeypatch.context() as patch:
        stop_after(37, script, patch)
        with pytest.raises(SystemExit) as exit_info:
            script.train(args)
    assert exit_info.value.code == 130
    return next((folder / "runs").iterdir())


@pytest.mark.parametrize("script", [eaudecql_atari, polyprune_cql_atari], ids=["eaudecql", "polyprune_cql"])
def test_a_data_set_that_has_changed_is_refused(script, tmp_path, monkeypatch, capsys):
    run = stop_offline(script, tmp_path, monkeypatch)
    capsys.readouterr()
    for path in (tmp_path / "data").glob("*_ckpt.2.gz"):
        path.rename(path.with_name(path.name.replace("ckpt.2", "ckpt.7")))
    message = f"{tmp_path / 'data'} has other files than when the run was started"
    assert_refused(script, script.Args(resume=run), run, message, capsys)


def test_a_run_stopped_on_a_cpu_goes_on_with_many_updates_per_call_on_an_accelerator(tmp_path, monkeypatch):
    script = eaudecql_atari
    run = stop_offline(script, tmp_path, monkeypatch)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    script.train(script.Args(resume=run))
    assert checkpoint(run)["step"] == 120
    assert [step for step, _ in scalars(run)["sparsity/target"]] == [0, 20, 40, 60, 80, 100, 120]


@pytest.mark.parametrize("n_steps", [None, 123])
def test_without_checkpoints_only_the_policy_is_written(n_steps, tmp_path, monkeypatch, capsys):
    script = polyprune_dqn_atari
    if n_steps:
        stop_after(n_steps, script, monkeypatch)
        with pytest.raises(SystemExit):
            script.train(script.Args(runs_dir=tmp_path, checkpoint_period=0, **PONG))
    else:
        script.train(script.Args(runs_dir=tmp_path, checkpoint_period=0, **PONG))
    (run,) = tmp_path.iterdir()
    names = sorted(path.name.split(".")[0] for path in run.iterdir())
    assert names == ["args", "events", "policy"]
    assert "--resume" not in capsys.readouterr().out
    assert script.load_policy(run / "policy.npz")[0]["step"] == (n_steps or 400)


@pytest.mark.parametrize("script", [eaudedqn_atari, polyprune_dqn_atari], ids=["eaudedqn", "polyprune_dqn"])
def test_a_disk_without_room_is_said_at_the_start(script, tmp_path, monkeypatch, capsys):
    flags = PONG | dict(total_timesteps=10**10, buffer_size=10**9, checkpoint_period=10**8)  # 7.76 TB
    usage = shutil.disk_usage(tmp_path)._replace(free=10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(runs_dir=tmp_path, **flags))
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert "the replay memory needs 7761.60 GB" in message
    assert "6761.60 GB are missing" in message
    for flag in ("--buffer-size", "--checkpoint-period"):
        assert flag in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_room_of_the_memory_is_taken_at_the_start(stopped):
    replay = (stopped / "replay").stat()
    assert replay.st_size == (100 + 4 + 300) * 84 * 84  # the buffer, the frames around it, what is left of the run
    assert replay.st_blocks * 512 >= replay.st_size


@pytest.mark.parametrize("script", [eaudesac_mujoco, polyprune_sac_mujoco], ids=["eaudesac", "polyprune_sac"])
def test_every_episode_has_a_seed_of_the_runs_generator(script, tmp_path, monkeypatch):
    seeds, reset = [], Probe.reset
    monkeypatch.setattr(Probe, "reset", lambda env, seed=None, options=None: seeds.append(seed) or reset(env, seed))
    flags = dict(env_id="Probe", total_timesteps=50, learning_starts=50, batch_size=4, eval_period=60)
    for seed in (3, 3, 4):
        script.train(script.Args(runs_dir=tmp_path, critic_features=(8,), actor_features=(8,), seed=seed, **flags))
    runs = np.array(seeds).reshape(3, 11)  # 10 episodes, and the start of the next one
    assert len(set(runs[0])) == 11
    np.testing.assert_array_equal(runs[0], runs[1])
    assert not set(runs[0]) & set(runs[2])
