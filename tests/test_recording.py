"""Files of the DQN Replay data set that `play_policy.py` writes: what the offline scripts read is what was played."""

import gzip
import re

import numpy as np
import pytest
from test_replay import play

import play_policy
from eaudecql_atari import Args, load_file, valid_rows
from play_policy import Recorder

MEMBERS = ("observation", "action", "reward", "terminal")


def record(folder, n_rows, n_steps, seed=3):
    recorder = Recorder(folder, n_rows)
    for transition in play(n_steps, seed):
        recorder.add(*[np.array([x]) for x in transition[:-1]])
    recorder.write()
    return recorder


def read_column(folder, name, number):
    with gzip.open(folder / f"$store$_{name}_ckpt.{number}.gz") as file:
        return np.load(file)


@pytest.mark.parametrize("n_rows", [12, 1_000])
def test_what_the_recorder_wrote_is_read_back_exactly(tmp_path, n_rows):
    n_files, transitions, read = record(tmp_path, n_rows, n_steps=200).n_files, {}, set()
    for observation, action, reward, terminal, truncated, next_observation in play(200, seed=3):
        if not truncated:  # what follows was never seen
            transitions[action] = (observation, np.clip(reward, -1, 1), terminal, next_observation)
    n_cuts = 0
    for number in range(n_files):
        frames, actions, rewards, terminals = load_file(Args(dataset_dir=tmp_path), number, n_actions=1_000)
        for i in valid_rows(terminals):
            observation, reward, terminal, next_observation = transitions[actions[i]]
            np.testing.assert_array_equal(frames[i - 3 : i + 1], observation)
            assert (rewards[i], terminals[i]) == (reward, terminal)
            if not terminal:
                np.testing.assert_array_equal(frames[i - 2 : i + 2], next_observation)
            assert actions[i] not in read
            read.add(actions[i])
        n_cuts += not terminals[-1]
    lost = transitions.keys() - read
    # Lost are the last row of a file, unless a truncation ended it there, and the first three of one that goes on.
    assert len(lost) <= 4 * n_cuts + n_files
    if n_rows == 1_000:  # files end only with a truncation, or with the recording
        assert lost <= {199}
    assert n_files > 5


def test_a_recorded_file_is_laid_out_as_the_public_ones(tmp_path):
    n_files = record(tmp_path, 20, n_steps=60).n_files
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"$store$_{name}_ckpt.{n}.gz" for name in MEMBERS for n in range(n_files)}
    columns = {name: read_column(tmp_path, name, 0) for name in MEMBERS}
    assert [(columns[name].dtype, columns[name].shape[1:]) for name in MEMBERS] == [
        (np.uint8, (84, 84)),
        (np.int32, ()),
        (np.float32, ()),
        (np.uint8, ()),
    ]
    starts = [0, *(np.flatnonzero(columns["terminal"][:-4]) + 1)]
    for start in starts:  # three rows of zeros, then the first frame
        for name in MEMBERS:
            assert not columns[name][start : start + 3].any()
        assert columns["observation"][start + 3].any()


def test_rewards_are_clipped(tmp_path):
    n_files = record(tmp_path, 1_000, n_steps=200).n_files
    rewards = np.concatenate([read_column(tmp_path, "reward", number) for number in range(n_files)])
    assert set(rewards) == {-1.0, 0.0, 1.0}  # played were -3 to 3


def test_a_truncation_ends_its_file_and_the_next_one_starts_with_padding(tmp_path):
    transitions = list(play(200, seed=3))
    record(tmp_path, 1_000, n_steps=200)
    cut = [action for _, action, _, _, truncated, _ in transitions if truncated]
    n_files = len(list(tmp_path.glob("$store$_action_ckpt.*.gz")))
    last = [read_column(tmp_path, "action", number)[-1] for number in range(n_files)]
    recorded_cuts = [action for action in cut if action in last]
    assert recorded_cuts == last[: len(recorded_cuts)]
    # Nothing is after a truncation in its file: an episode of a single cut step has no transition, and no file.
    actions = np.concatenate([read_column(tmp_path, "action", number)[:-1] for number in range(n_files)])
    assert not set(cut) & set(actions[actions > 0])
    for number in range(n_files):
        assert not read_column(tmp_path, "observation", number)[:3].any()


def test_numbers_go_on_from_the_files_that_are_there(tmp_path):
    first = record(tmp_path, 20, n_steps=60, seed=3).n_files
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    second = record(tmp_path, 20, n_steps=60, seed=4).n_files
    assert second > first > 0
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert {name: after[name] for name in before} == before
    numbers = sorted(int(re.search(r"\.(\d+)\.", name)[1]) for name in after)
    assert numbers == sorted(list(range(second)) * 4)


def test_a_folder_with_other_files_is_refused_and_left_alone(tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SystemExit) as exit_info:
        Recorder(tmp_path, 20)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error == f"error: --record-dir {tmp_path} has other files, such as notes.txt: choose another folder\n"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_set_of_files_that_cannot_be_finished_is_taken_away(tmp_path, monkeypatch):
    recorder = record(tmp_path, 1_000, n_steps=60)
    before = set(tmp_path.iterdir())
    for transition in play(6, seed=8):
        recorder.add(*[np.array([x]) for x in transition[:-1]])
    save, saved = np.save, []

    def save_two(file, column):
        if len(saved) == 2:
            raise OSError("No space left on device")
        saved.append(save(file, column))

    monkeypatch.setattr(play_policy.np, "save", save_two)
    with pytest.raises(OSError, match="No space left"):
        recorder.write()
    assert set(tmp_path.iterdir()) == before
