"""A run that was killed and resumed ends as one that never stopped. Damaged and foreign checkpoints are refused."""

import dataclasses
import errno
import fcntl
import gc
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import filelock
import jax
import numpy as np
import pytest
import tyro
from common import LIMIT, TINY, final_weights, scalars
from numpy.lib.recfunctions import rename_fields
from test_replay_data import logged_rows, write_file

import eaudecql_atari
import eaudedqn_atari
import eaudesac_mujoco
import polyprune_cql_atari
import polyprune_dqn_atari
import polyprune_sac_mujoco

TOTAL, PERIOD = 1_200, 250
SHORT = f"--total-timesteps {TOTAL} --checkpoint-period {PERIOD} --batch-size 8"
ATARI = f"{SHORT} --env-id Pong --horizon 170 --features 2 3 3 4"
ONLINE = f"{ATARI} --learning-starts 100 --gradient-period 6 --target-period 60 --buffer-size 300"
ONLINE += " --epsilon-duration 400"
OFFLINE = f"{ATARI} --dataset-dir data --files-in-memory 2 --eval-episodes 2 --epoch-steps 400 --target-period 60"
MUJOCO = f"{SHORT} --env-id Hopper --learning-starts 100 --critic-features 8 --actor-features 8 --buffer-size 300"
MUJOCO += " --pruning-period 60 --actor-final-sparsity 0.5 --eval-period 400 --eval-episodes 2 --policy-delay 7"
POPULATION = " --n-networks 3 --tournament-size 2"
FLAGS = {
    eaudedqn_atari: ONLINE + POPULATION,
    polyprune_dqn_atari: ONLINE + " --pruning-period 50",
    eaudecql_atari: OFFLINE + POPULATION,
    polyprune_cql_atari: OFFLINE + " --pruning-period 50",
    eaudesac_mujoco: MUJOCO + POPULATION,
    polyprune_sac_mujoco: MUJOCO,
}
SCRIPTS = pytest.mark.parametrize("script", FLAGS, ids=lambda script: script.__name__)


def start(folder, script, flags, strike=""):
    """The script as a process of its own, which gets a signal on the way if there is a `strike`."""
    strike = [str(Path(__file__).with_name("strike.py")), *strike.split()] if strike else []
    command = [sys.executable, *strike, script.__file__, *flags.split()]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, timeout=LIMIT)


def write_data(folder, n_actions=6):
    """Five files of the data set."""
    folder.mkdir()
    for number in range(5):
        rows, _ = logged_rows(60, seed=number)
        write_file(folder, number, [(frame, action % n_actions, *rest) for frame, action, *rest in rows])
    return folder


def checkpoint(run):
    return eaudedqn_atari.read_npz(run / "checkpoint.npz")


def run_until_the_end(folder, script, name, strikes):
    """Start, be struck, resume, be struck, ..., resume, finish. Of a strike: signal, moment, step of the checkpoint."""
    arguments, saved = f"{FLAGS[script]} --runs-dir {name}", None
    for signum, moment, step in strikes:
        result = start(folder, script, arguments, f"{signum} {moment}")
        (run,) = (folder / name).iterdir()
        assert result.returncode == {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130}[signum], result.stderr
        saved = checkpoint(run)
        assert saved[0]["step"] == step
        arguments = f"--resume {run.relative_to(folder)}"
        if signum != "SIGKILL":
            assert f"Interrupted after {step:,} steps" in result.stdout
            assert result.stderr == ""
            assert f"python {os.path.relpath(script.__file__, folder)} {arguments}\n" in result.stdout
            assert not list(run.glob("*.tmp"))
    result = start(folder, script, arguments)
    assert (result.returncode, result.stderr) == (0, "")
    (run,) = (folder / name).iterdir()
    assert (", after 0 steps\n" in result.stdout) == (not strikes)
    shown = re.findall(" 00:00 left, (.*)", result.stdout)[-1].split(", ")
    return run, sorted(shown), saved  # in the order in which they came up since the start, or since the run goes on


def assert_same_files(left, right, but=()):
    """Two (about, arrays) of files, without the entries of `but` in `about`."""
    assert {k: x for k, x in left[0].items() if k not in but} == {k: x for k, x in right[0].items() if k not in but}
    assert left[1].keys() == right[1].keys()
    for name, x in left[1].items():
        assert x.dtype == right[1][name].dtype
        np.testing.assert_array_equal(x, right[1][name])


def assert_same_results(run, other):
    """All that a finished run leaves behind, but for its speed and its place."""
    assert_same_files(*(eaudedqn_atari.read_npz(x / "policy.npz") for x in (run, other)), but=("args",))
    curves = [{tag: values for tag, values in scalars(x).items() if tag != "charts/SPS"} for x in (run, other)]
    assert curves[0] == curves[1]


@pytest.mark.slow
@SCRIPTS
def test_a_run_that_was_struck_ends_as_one_that_was_not(script, tmp_path):
    write_data(tmp_path / "data")
    rng = random.Random(script.__name__)
    step_end = f"{script.__name__}.save_is_due"  # called at the end of each step, before it is saved
    steps = [rng.randrange(PERIOD + 1, 2 * PERIOD), rng.randrange(1, PERIOD), rng.randrange(1, PERIOD)]
    kills = [
        ("SIGKILL", f"{step_end} {steps[0]}", PERIOD),
        ("SIGKILL", "_format_impl.write_array 9", PERIOD),  # the next checkpoint is half written
        ("SIGKILL", "pathlib.replace 3", 2 * PERIOD),  # the second one is written, but still has another name
        ("SIGKILL", "pathlib.replace 2", 3 * PERIOD),  # the policy that goes with it has
        ("SIGKILL", f"{step_end} {steps[1]}", 3 * PERIOD),
        ("SIGTERM", f"{step_end} {997 - 3 * PERIOD}", 997),  # what is logged at 1,000 was learned before
    ]
    stops = [
        ("SIGTERM", f"{step_end} {PERIOD + steps[2]}", PERIOD + steps[2]),
        ("SIGINT", f"{step_end} 1", PERIOD + steps[2] + 1),
        ("SIGTERM", f"{step_end} {997 - PERIOD - steps[2] - 1}", 997),
    ]
    if script.__name__.startswith("polyprune"):  # the same bytes save and load it: one kill, one stop
        kills = [kills[0], ("SIGTERM", f"{step_end} {997 - PERIOD}", 997)]
        stops = [("SIGTERM", f"{step_end} 997", 997)]
    with ThreadPoolExecutor(2) as pool:  # two processes side by side
        runs = [("killed", kills), ("stopped", stops), ("never", [])]
        futures = [pool.submit(run_until_the_end, tmp_path, script, *run) for run in runs]
        (killed, last_line, saved), (stopped, other_line, also_saved), (never, expected, _) = [
            x.result() for x in futures
        ]
    assert last_line == other_line == expected
    curves = scalars(never)
    assert curves["sparsity/target"][-1][1] > 0
    assert len(curves["sparsity/target"]) > 15
    assert len(curves["charts/SPS"]) == 1
    assert any(tag.startswith("losses/") and values[0][0] == 1_000 for tag, values in curves.items())
    assert sorted(path.name.split(".")[0] for path in never.iterdir()) == ["args", "events", "policy"]
    assert_same_files(saved, also_saved, but=("files",))
    assert_same_results(killed, never)
    assert_same_results(stopped, never)


DATA = dict(features=TINY, batch_size=8, target_period=20, eval_episodes=1, horizon=20, files_in_memory=2)
DATA |= dict(total_timesteps=120, epoch_steps=60)
PONG = dict(env_id="Pong", features=TINY, total_timesteps=400, learning_starts=50, batch_size=8, buffer_size=100)


def stop_after(n_steps, script, monkeypatch, signums=(signal.SIGINT,)):
    """Send signals in that step of the next run."""
    calls, save_is_due = [], script.Run.save_is_due  # called at the end of each step, before it is saved

    def call(run):
        calls.append(run.step)
        if len(calls) == n_steps:
            for signum in signums:
                signal.raise_signal(signum)
        return save_is_due(run)

    monkeypatch.setattr(script.Run, "save_is_due", call)


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


@pytest.fixture(autouse=True)
def command_line(monkeypatch):
    """`main` looks at it: here it would be that of pytest."""
    monkeypatch.setattr(sys, "argv", ["script.py"])


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


def flip(data, position, bit=0):
    return data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :]


DAMAGES = {
    "empty": lambda data: b"",
    "of one byte": lambda data: data[:1],
    "half": lambda data: data[: len(data) // 2],
    "short of a byte": lambda data: data[:-1],
    "a text": lambda data: b"not a zip",
    "flipped": lambda data: flip(data, len(data) // 2),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_checkpoints_are_refused(damage, run, capsys):
    script, path = polyprune_dqn_atari, run / "checkpoint.npz"
    path.write_bytes(damage(path.read_bytes()))
    assert_refused(script, script.Args(resume=run), run, f"{path} is damaged", capsys)


def test_no_flipped_bit_loads_another_value(run, capsys):
    path, rng = run / "checkpoint.npz", random.Random(0)
    data, expected = path.read_bytes(), checkpoint(run)
    headers = [i + k for i in range(len(data)) if data[i : i + 2] == b"PK" for k in range(0, 160, 3)]  # of zip and npy
    positions = [*rng.sample(headers, 300), *rng.sample(range(len(data)), 300)]
    refused = 0
    for position in positions:
        path.write_bytes(flip(data, min(position, len(data) - 1), rng.randrange(8)))
        try:
            found = checkpoint(run)
        except SystemExit as error:
            refused += error.code == 2
            continue
        assert_same_files(found, expected)
    assert refused > 400  # in the others nothing of importance was hit, as a date
    assert capsys.readouterr().err == f"error: {path} is damaged\n" * refused


def test_foreign_runs_and_files_are_refused(run, tmp_path, capsys):
    script, nowhere = polyprune_dqn_atari, tmp_path / "nowhere"
    message = f"{nowhere} is not the folder of a run"
    assert_refused(script, script.Args(resume=nowhere), nowhere, message, capsys)
    for other in FLAGS:
        if other is not script:
            assert_refused(other, other.Args(resume=run), run, f"{run} is a run of polyprune_dqn_atari", capsys)
    flags = json.loads((run / "args.json").read_text())
    (run / "args.json").write_text(json.dumps(flags | {"momentum": 0.9, "annealing": 1}))  # one is lost, two are new
    (run / "args.json").write_text((run / "args.json").read_text().replace('"gamma"', '"discount"'))
    message = f"{run} is a run of another version of this script: it differs in "
    message += "annealing, discount, gamma, momentum"
    assert_refused(script, script.Args(resume=run), run, message, capsys)
    for text in ("{", "[1]"):
        (run / "args.json").write_text(text)
        assert_refused(script, script.Args(resume=run), run, f"{run / 'args.json'} is damaged", capsys)


@SCRIPTS
def test_a_run_without_anything_learned_says_so(script, tmp_path, capsys, monkeypatch):
    """Also one that was stopped: what counts is how far it has come."""
    if "dataset-dir" in FLAGS[script]:
        write_data(tmp_path / "data")
    first = {"atari": 150, "mujoco": 101}[script.__name__.rpartition("_")[2]]  # step whose end has a trained policy
    first = 60 if "cql" in script.__name__ else first
    flags = f"{FLAGS[script]} --total-timesteps {first} --checkpoint-period 0 --runs-dir {tmp_path}"
    flags = flags.replace("--epoch-steps 400", f"--epoch-steps {first}").replace(" data ", f" {tmp_path / 'data'} ")
    if "cql" not in script.__name__:  # the target update at 100 is too early: the first gradient step is at 102
        flags = flags.replace("--target-period 60", "--target-period 50")
    args = tyro.cli(script.Args, args=flags.split())
    with monkeypatch.context() as patch:
        stop_after(first - 1, script, patch)
        with pytest.raises(SystemExit):
            script.train(args)
    assert "The policy is an untrained network: " in capsys.readouterr().out
    script.train(args)
    assert "The policy is an untrained network: " not in capsys.readouterr().out


def test_a_run_that_was_killed_before_its_first_checkpoint_cannot_go_on(run, capsys):
    for name in ("checkpoint.npz", "policy.npz"):
        (run / name).unlink()
    script, message = polyprune_dqn_atari, f"{run} has no checkpoint to go on from"
    assert_refused(script, script.Args(resume=run), run, message, capsys)


@pytest.mark.parametrize("pattern", ["replay", "events*"])
def test_missing_files_are_refused(pattern, run, capsys):
    script, (path,) = polyprune_dqn_atari, run.glob(pattern)
    path.unlink()
    message = f"[Errno 2] No such file or directory: '{path}'"
    assert_refused(script, script.Args(resume=run), run, message, capsys)


@pytest.mark.parametrize("flag", ["--seed 2", "--total-timesteps 10000000", "--checkpoint-period=250000"])
def test_other_flags_are_refused_even_if_they_say_what_is_so_without_them(flag, run, capsys, monkeypatch):
    script = polyprune_dqn_atari
    monkeypatch.setattr(sys, "argv", ["script.py", "--resume", str(run), *flag.split()])
    message = "--resume goes on with the run's own flags: leave out all others"
    assert_refused(script, tyro.cli(script.Args), run, message, capsys)


def change_checkpoint(run, change):
    about, arrays = checkpoint(run)
    arrays = change(arrays)
    np.savez(run / "checkpoint.npz", about=json.dumps(about | {"arrays": list(arrays)}), **arrays)


OTHER_VERSIONS = {
    "an array less": lambda arrays: {name: x for name, x in arrays.items() if "masks" not in name},
    "an array more": lambda arrays: arrays | {"state/noise": np.zeros(3)},
    "another name": lambda arrays: {name.replace("opt_state", "adam"): x for name, x in arrays.items()},
    "other columns": lambda arrays: arrays | {"memory/rows": rename_fields(arrays["memory/rows"], {"actions": "acts"})},
    "another shape": lambda arrays: {name: x[:-1] if "/target_params/" in name else x for name, x in arrays.items()},
}


@pytest.mark.parametrize("change", OTHER_VERSIONS.values(), ids=OTHER_VERSIONS)
def test_checkpoints_of_another_version_are_refused(change, run, capsys):
    script, path = polyprune_dqn_atari, run / "checkpoint.npz"
    change_checkpoint(run, change)
    message = f"{path} is of another version of this script"
    assert_refused(script, script.Args(resume=run), run, message, capsys)


def test_a_checkpoint_is_read_by_name_not_by_order(run, tmp_path):
    """With two fields of the state exchanged, the target would be taken for the network that learns."""
    script, other = polyprune_dqn_atari, Path(shutil.copytree(run, tmp_path / "other"))
    change_checkpoint(other, lambda arrays: dict(reversed(arrays.items())))
    assert_same_results(*(script.train(script.Args(resume=x)) for x in (run, other)))


@pytest.mark.parametrize("player", [True, False])
def test_printed_commands_can_be_pasted(player, tmp_path, monkeypatch, capsys):
    script = polyprune_dqn_atari
    if not player:  # a copy of the script elsewhere
        monkeypatch.setattr(script, "__file__", str(tmp_path / "my copy.py"))
    stop_after(60, script, monkeypatch)
    with pytest.raises(SystemExit):
        script.train(script.Args(runs_dir=tmp_path / "my runs", **PONG))
    (run,) = (tmp_path / "my runs").iterdir()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("python", "tensorboard"))]
    resume, *play, board = [shlex.split(line) for line in lines]
    assert (Path(resume[1]).resolve(), *resume[2:]) == (Path(script.__file__), "--resume", str(run))
    assert board == ["tensorboard", "--logdir", str(tmp_path / "my runs")]
    found = [(Path(words[1]).resolve(), *words[2:]) for words in play]
    assert found == ([(Path(script.__file__).with_name("play_policy.py"), str(run))] if player else [])


def test_a_run_has_one_process(run, capsys, monkeypatch):
    script, save_is_due, refused = polyprune_dqn_atari, polyprune_dqn_atari.Run.save_is_due, []

    def resume_as_well(current):
        if not refused:
            with pytest.raises(SystemExit) as exit_info:
                script.main(script.Args(resume=current.folder))
            refused.append((exit_info.value.code, capsys.readouterr().err))
        return save_is_due(current)

    monkeypatch.setattr(script.Run, "save_is_due", resume_as_well)
    script.train(script.Args(resume=run))
    assert refused == [(2, f"error: another process is at work on {run}\n")]
    refused.clear()
    new = script.train(script.Args(runs_dir=run, **PONG))  # before its first checkpoint, too
    assert refused == [(2, f"error: another process is at work on {new}\n")]


def test_runs_that_begin_together_have_folders_of_their_own(tmp_path, monkeypatch):
    script, times = polyprune_dqn_atari, iter([1_000.001, 1_000.002, 1_000.002])
    monkeypatch.setattr(script, "time", SimpleNamespace(time=lambda: next(times)))
    first, second, same = [script.Run(script.Args(runs_dir=tmp_path), None) for _ in range(3)]
    for run in (first, second):
        run.restore()
    assert len(list(tmp_path.iterdir())) == 2
    with pytest.raises(filelock.Timeout):
        same.restore()
    same.close()
    assert len(list(tmp_path.iterdir())) == 2  # it is not its own to delete
    for run in (second, first):
        run.close()
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_says_so_and_stays_as_it_is(run, stopped, capsys):
    script = polyprune_dqn_atari
    assert script.train(script.Args(resume=run)) == run
    assert "Finished after 400 steps" in capsys.readouterr().out
    before = {path: path.read_bytes() for path in run.iterdir()}
    assert {path.name.split(".")[0] for path in before} == {"args", "events", "policy"}
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(resume=run))
    assert exit_info.value.code is None  # success
    assert capsys.readouterr().out == f"{run} is finished\n"
    assert before == {path: path.read_bytes() for path in run.iterdir()}
    shutil.copy(stopped / "checkpoint.npz", run)  # as if it had been killed before this was deleted
    shutil.copy(stopped / "replay", run)
    assert script.train(script.Args(resume=run)) == run
    assert {path.name: path.read_bytes() for path in run.glob("policy*")} == {
        path.name: x for path, x in before.items() if "policy" in path.name
    }


@pytest.mark.parametrize(
    ("signums", "code"),
    [((signal.SIGTERM, signal.SIGTERM), 143), ((signal.SIGINT, signal.SIGTERM), 143)],
    ids=["SIGTERM twice", "SIGINT and SIGTERM"],
)
def test_a_second_sigterm_does_not_keep_the_checkpoint_from_being_written(signums, code, tmp_path, monkeypatch, capsys):
    script = polyprune_dqn_atari
    stop_after(60, script, monkeypatch, signums)
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(runs_dir=tmp_path, **PONG))
    assert exit_info.value.code == code
    assert checkpoint(next(tmp_path.iterdir()))[0]["step"] == 60
    assert "Stopping, with a checkpoint." in capsys.readouterr().out


def test_a_second_ctrl_c_ends_the_run_at_once(tmp_path, monkeypatch):
    script = polyprune_dqn_atari
    stop_after(60, script, monkeypatch, (signal.SIGINT, signal.SIGINT))
    with pytest.raises(SystemExit) as exit_info:  # and not a KeyboardInterrupt, which would show a traceback
        script.main(script.Args(runs_dir=tmp_path, **PONG))
    assert exit_info.value.code == 130
    assert not list(tmp_path.glob("*/checkpoint.npz"))


def test_ctrl_c_while_the_script_starts_leaves_neither_a_traceback_nor_a_folder(tmp_path):
    flags = f"--runs-dir {tmp_path / 'runs'}"
    result = start(tmp_path, polyprune_dqn_atari, flags, "SIGINT polyprune_dqn_atari.check_args 1")
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_first_file_is_written_ends_the_run_after_its_first_step(tmp_path, monkeypatch):
    script, write_text = polyprune_dqn_atari, Path.write_text
    monkeypatch.setattr(Path, "write_text", lambda *x: signal.raise_signal(signal.SIGINT) or write_text(*x))
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.Args(runs_dir=tmp_path, **PONG))
    assert exit_info.value.code == 130
    assert checkpoint(next(tmp_path.iterdir()))[0]["step"] == 1


def test_a_signal_in_the_last_step_changes_nothing(tmp_path, monkeypatch, capsys):
    script = polyprune_dqn_atari
    stop_after(400, script, monkeypatch)
    script.train(script.Args(runs_dir=tmp_path, **PONG))
    output = capsys.readouterr().out
    assert "Finished after 400 steps" in output
    assert "Stopping" not in output


def test_the_end_is_in_the_log_before_the_checkpoint_is_deleted(run, tmp_path, monkeypatch):
    """A sweep takes a run without either for one that has to start again."""
    script, log, unlink, seen = polyprune_dqn_atari, tmp_path / "log", Path.unlink, []

    def read_and_unlink(path, **options):
        seen.extend(["Finished after 400 steps" in log.read_text()] * (path.name == "checkpoint.npz"))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", read_and_unlink)
    with open(log, "w") as file:  # which has a buffer
        monkeypatch.setattr(sys, "stdout", file)
        script.train(script.Args(resume=run))
    assert seen == [True]


def test_a_disk_that_fills_up_leaves_the_checkpoint_before(tmp_path, monkeypatch, capsys):
    script, save = polyprune_dqn_atari, polyprune_dqn_atari.write_npz.__defaults__[0]

    def save_half(file, **arrays):
        save(file, **arrays)
        if json.loads(arrays["about"])["step"] == 200:
            file.truncate(1_000)
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(script.write_npz, "__defaults__", (save_half,))
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.Args(runs_dir=tmp_path, checkpoint_period=100, **PONG))
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == "error: [Errno 28] No space left on device\n"
    monkeypatch.undo()
    (run,) = tmp_path.iterdir()
    assert checkpoint(run)[0]["step"] == 100
    assert not list(run.glob("*.tmp"))
    assert script.train(script.Args(resume=run)) == run


def stop_offline(script, folder, monkeypatch, n_calls=37):
    """A run that was stopped, on a CPU after 37 of its 120 steps."""
    folder.mkdir(exist_ok=True)
    write_data(folder / "data")
    args = script.Args(runs_dir=folder / "runs", dataset_dir=folder / "data", **DATA)
    with monkeypatch.context() as patch:
        stop_after(n_calls, script, patch)
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
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.Args(resume=run))
    assert exit_info.value.code == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert checkpoint(run)[0]["step"] == 37


@pytest.mark.parametrize("script", [eaudecql_atari, polyprune_cql_atari], ids=["eaudecql", "polyprune_cql"])
def test_a_data_set_that_vanishes_leaves_a_checkpoint_to_go_on_from(script, tmp_path, capsys, monkeypatch):
    data = write_data(tmp_path / "data")
    args = script.Args(runs_dir=tmp_path / "runs", dataset_dir=data, **DATA | dict(epoch_steps=20))
    next_files = script.ReplayData.next_files
    moved = []

    def vanish(self):  # after the first epoch, when the files of the second have been read
        if not moved:
            moved.extend(future.result() for future in self.reading)
            data.rename(tmp_path / "elsewhere")
        next_files(self)

    monkeypatch.setattr(script.ReplayData, "next_files", vanish)
    with pytest.raises(SystemExit) as exit_info:
        script.main(args)
    assert exit_info.value.code == 2
    assert re.fullmatch(r"error: \S+_ckpt\.\d\.gz cannot be used: .*\n", capsys.readouterr().err)
    (run,) = (tmp_path / "runs").iterdir()
    assert checkpoint(run)[0]["step"] == 40
    (tmp_path / "elsewhere").rename(data)
    script.train(script.Args(resume=run))
    assert len(scalars(run)["eval/episodic_return"]) == 6


@pytest.mark.parametrize("script", [eaudecql_atari, polyprune_cql_atari], ids=["eaudecql", "polyprune_cql"])
def test_an_offline_run_goes_on_from_another_folder(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = stop_offline(script, Path(), monkeypatch).resolve()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    script.train(script.Args(resume=run))
    assert len(scalars(run)["eval/episodic_return"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("script", [eaudecql_atari, polyprune_cql_atari], ids=["eaudecql", "polyprune_cql"])
def test_many_updates_in_a_call_on_an_accelerator_are_those_of_a_cpu(script, tmp_path, monkeypatch, capsys):
    """Stopped there after 60 of 120 steps, or on a CPU after 37, and resumed there."""
    stopped = stop_offline(script, tmp_path / "stopped", monkeypatch)
    args = script.Args(runs_dir=tmp_path / "others", dataset_dir=tmp_path / "stopped" / "data", **DATA)
    on_cpu, calls = script.train(args), []
    learn_many = script.learn_many
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(script, "learn_many", lambda *x: calls.append(len(x[-1].actions)) or learn_many(*x))
    script.train(script.Args(resume=stopped))
    assert set(calls) == {1}  # as no more divides the 37 steps
    calls.clear()
    stopped_there = stop_offline(script, tmp_path / "there", monkeypatch, n_calls=3)
    capsys.readouterr()
    script.train(script.Args(resume=stopped_there))
    assert calls == [20] * 6
    assert "120/120 steps" in capsys.readouterr().out
    for run in (stopped, stopped_there):
        assert [step for step, _ in scalars(run)["sparsity/target"]] == [20, 40, 60, 80, 100, 120]
        for name, x in final_weights(on_cpu).items():
            np.testing.assert_allclose(final_weights(run)[name], x, atol=1e-4)


@pytest.mark.parametrize(("script", "n_steps"), [(eaudedqn_atari, None), (polyprune_dqn_atari, 123)])
def test_without_checkpoints_only_the_policy_is_written(script, n_steps, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(script, "frames_on_disk", lambda *_: pytest.fail("nor anything on the way"))
    if n_steps:
        stop_after(n_steps, script, monkeypatch)
        with pytest.raises(SystemExit):
            script.train(script.Args(runs_dir=tmp_path, checkpoint_period=0, **PONG))
    else:
        script.train(script.Args(runs_dir=tmp_path, checkpoint_period=0, **PONG))
    (run,) = tmp_path.iterdir()
    names = {path.name.split(".")[0] for path in run.iterdir()}
    assert names - {"in_use"} == {"args", "events", "policy"}
    assert "--resume" not in capsys.readouterr().out
    assert script.read_npz(run / "policy.npz")[0]["step"] == (n_steps or 400)


@pytest.mark.parametrize("script", [eaudedqn_atari, polyprune_dqn_atari], ids=["eaudedqn", "polyprune_dqn"])
def test_a_disk_without_room_is_said_at_the_start(script, tmp_path, monkeypatch, capsys):
    flags = PONG | dict(total_timesteps=10**10, buffer_size=10**9, checkpoint_period=10**8)  # 7.76 TB
    usage = shutil.disk_usage(tmp_path)._replace(free=10**12)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(runs_dir=tmp_path, **flags))
    assert exit_info.value.code == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: {tmp_path}/Pong__")
    assert " needs 7,761.6 GB: " in message
    for flag in ("--buffer-size", "--checkpoint-period"):
        assert flag in message
    assert message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_room_of_the_memory_is_taken_at_the_start(stopped):
    replay = (stopped / "replay").stat()
    assert replay.st_size == (100 + 4 + 300) * 84 * 84  # the buffer, the frames around it, what is left of the run
    assert replay.st_blocks * 512 >= replay.st_size


def test_the_room_is_taken_on_file_systems_that_cannot_do_that_at_once(tmp_path, monkeypatch):
    """On NFS glibc writes into every block of the file instead, unless it is open for appending."""

    def write_into_blocks(fd, offset, n_bytes):
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
            raise OSError(errno.EBADF, "Bad file descriptor")
        os.ftruncate(fd, n_bytes)

    monkeypatch.setattr(os, "posix_fallocate", write_into_blocks)
    assert eaudedqn_atari.frames_on_disk(tmp_path / "replay", (2, 84, 84)).shape == (2, 84, 84)


@pytest.mark.parametrize("script", [eaudesac_mujoco, polyprune_sac_mujoco], ids=["eaudesac", "polyprune_sac"])
def test_a_memory_that_is_too_large_is_said(script, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.Args(env_id="Hopper", buffer_size=10**13, total_timesteps=10**13, runs_dir=tmp_path))
    assert exit_info.value.code == 2
    assert re.fullmatch("error: .+\n", capsys.readouterr().err)


@pytest.mark.parametrize("script", [eaudesac_mujoco, polyprune_sac_mujoco], ids=["eaudesac", "polyprune_sac"])
def test_a_disk_without_room_for_two_checkpoints_is_said_at_the_start(script, tmp_path, monkeypatch, capsys):
    usage = shutil.disk_usage(tmp_path)._replace(free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    monkeypatch.setattr(script.Run, "steps", lambda *_, **__: pytest.fail("it has begun"))
    flags = dict(env_id="Hopper", runs_dir=tmp_path, critic_features=(4,), actor_features=(4,), eval_episodes=1)
    with pytest.raises(pytest.fail.Exception, match="it has begun"):  # with as many rows as it has steps
        script.train(script.Args(total_timesteps=10**4, buffer_size=10**6, **flags))
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(total_timesteps=10**6, buffer_size=10**6, **flags))  # 108 MB in memory
    assert exit_info.value.code == 2
    assert " needs 0.2 GB: lower --buffer-size, or --checkpoint-period 0 writes nothing\n" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    flags |= dict(critic_features=(2_048, 2_048), buffer_size=10**4)  # the agent takes more than the memory
    with pytest.raises(SystemExit):
        script.train(script.Args(total_timesteps=10**6, **flags))
    assert float(re.search(r" needs ([\d.]+) GB", capsys.readouterr().err)[1]) > 0.2


def test_a_run_that_goes_on_needs_room_for_a_full_checkpoint_beside_the_one_that_is_there(tmp_path, monkeypatch):
    (tmp_path / "checkpoint.npz").write_bytes(bytes(1_000))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    args = eaudesac_mujoco.Args(resume=tmp_path)
    free = 2 * 50_000 - 1_000
    eaudesac_mujoco.check_room(args, tmp_path, 50_000)
    free -= 1
    eaudesac_mujoco.check_room(dataclasses.replace(args, checkpoint_period=0), tmp_path, 50_000)  # none is written
    with pytest.raises(SystemExit):
        eaudesac_mujoco.check_room(args, tmp_path, 50_000)


def test_a_folder_that_cannot_be_made_leaves_the_handlers_of_the_caller(tmp_path):
    (tmp_path / "runs").touch()
    before = [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)]
    with pytest.raises(OSError, match="runs"):
        polyprune_dqn_atari.train(polyprune_dqn_atari.Args(runs_dir=tmp_path / "runs", **PONG))
    assert [signal.getsignal(x) for x in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_signal_that_comes_with_the_first_file_is_not_lost(tmp_path, monkeypatch):
    acquire = filelock.FileLock.acquire
    monkeypatch.setattr(filelock.FileLock, "acquire", lambda *x, **y: (acquire(*x, **y), signal.raise_signal(15)))
    with pytest.raises(SystemExit) as exit_info:
        eaudedqn_atari.train(eaudedqn_atari.Args(runs_dir=tmp_path, **PONG))
    assert exit_info.value.code == 143
    (run,) = tmp_path.iterdir()
    assert eaudedqn_atari.read_npz(run / "checkpoint.npz")[0]["step"] == 1
