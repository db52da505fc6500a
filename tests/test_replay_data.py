"""Files of the DQN Replay data set: what the offline scripts read and sample."""

import gzip
import itertools

import numpy as np
import pytest
from test_replay import play

import eaudecql_atari as script
import polyprune_cql_atari
from eaudecql_atari import REPLAY_MEMBERS, Args, ReplayData

PADDING = (np.zeros((84, 84), np.uint8), 0, 0.0, False)


def write_file(folder, number, rows, **changed):
    """One set of files as the public ones are: gzipped `np.save` streams."""
    for (name, dtype), values in zip(REPLAY_MEMBERS.items(), zip(*rows)):
        with gzip.open(folder / f"$store$_{name}_ckpt.{number}.gz", "wb") as file:
            np.save(file, changed.get(name, np.array(values, dtype)))


def logged_rows(n_rows, seed):
    """Rows of endless play, and of each its transition, None for padding: written from the format's description."""
    rows, transitions, starts = [], [], True
    for observation, action, reward, terminal, truncated, next_observation in play(n_rows, seed):
        terminal = terminal or truncated  # the public files know no truncation
        if starts:
            rows += [PADDING] * 3
            transitions += [None] * 3
        rows.append((observation[-1], action, np.clip(reward, -1, 1), terminal))
        transitions.append((observation, np.clip(reward, -1, 1), terminal, next_observation))
        starts = terminal
    return rows[:n_rows], transitions[:n_rows]


def assert_is_transition(transition, frames, reward, terminal):
    observation, true_reward, true_terminal, next_observation = transition
    np.testing.assert_array_equal(frames[:-1], observation)
    assert (reward, terminal) == (true_reward, true_terminal)
    if not terminal:
        np.testing.assert_array_equal(frames[1:], next_observation)


@pytest.mark.parametrize("kept_rows", [10, 37, 40, 100])
def test_every_valid_row_and_no_other_is_sampled(tmp_path, kept_rows):
    rows, transitions = logged_rows(150, seed=0)
    cuts = [0, 40, 77, 150]  # files end wherever they end, most often within an episode
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        write_file(tmp_path, number, rows[first:last])
    data = ReplayData(Args(dataset_dir=tmp_path, kept_rows=kept_rows), np.random.default_rng(0), n_actions=150)
    expected = {}
    for first, last in itertools.pairwise(cuts):
        for i in range(first + 3, min(last, first + kept_rows) - 1):  # not the first three rows of a file, nor its last
            if transitions[i] is not None:
                expected[rows[i][1]] = transitions[i]
    seen = set()
    for _ in range(200):
        batch = data.sample(20)
        for frames, action, reward, terminal in zip(*batch):
            assert_is_transition(expected[action], frames, reward, terminal)
            seen.add(action)
    assert seen == set(expected)


def test_rewards_are_clipped(tmp_path):
    write_file(tmp_path, 0, [(np.zeros((84, 84)), n, reward, False) for n, reward in enumerate([-7.5, 0.25, 3.0] * 5)])
    batch = ReplayData(Args(dataset_dir=tmp_path), np.random.default_rng(0), n_actions=15).sample(200)
    assert set(batch.rewards) == {-1.0, 0.25, 1.0}
    np.testing.assert_array_equal(batch.rewards, np.array([-1, 0.25, 1])[batch.actions % 3])


def test_files_without_a_whole_transition_are_passed_over_and_large_ones_are_drawn_more_often(tmp_path):
    for number, n_rows in enumerate((4, 14, 34)):  # 0, 10 and 30 valid rows
        write_file(tmp_path, number, [(np.zeros((84, 84)), number, 0.0, False)] * n_rows)
    data = ReplayData(Args(dataset_dir=tmp_path), np.random.default_rng(0), n_actions=3)
    counts = np.bincount([data.sample(1).actions[0] for _ in range(4_000)])
    np.testing.assert_allclose(counts / 4_000, [0, 0.25, 0.75], atol=0.03)


@pytest.mark.parametrize("seed", range(10))
def test_files_without_a_whole_transition_are_never_all_there_is(seed, tmp_path):
    for number, n_rows in enumerate((4, 14, 4, 14)):
        write_file(tmp_path, number, [(np.zeros((84, 84)), number, 0.0, False)] * n_rows)
    data = ReplayData(Args(dataset_dir=tmp_path, files_in_memory=1), np.random.default_rng(seed), n_actions=4)
    for _ in range(5):
        assert data.sample(1).actions[0] in (1, 3)
        data.next_files()


def test_each_batch_comes_from_one_file_and_epochs_bring_others(tmp_path):
    for number in range(7):
        write_file(tmp_path, number, [(np.zeros((84, 84)), number, 0.0, False)] * 10)
    (tmp_path / "$store$_action_ckpt.0 (1).gz").touch()  # as browsers call a second download
    data = ReplayData(Args(dataset_dir=tmp_path, files_in_memory=3), np.random.default_rng(0), n_actions=7)
    previous = set()
    for _ in range(10):
        batches = [set(data.sample(8).actions) for _ in range(50)]
        assert all(len(numbers) == 1 for numbers in batches)
        current = set.union(*batches)
        assert len(current) == 3
        assert not current & previous
        previous = current
        data.next_files()


def test_what_follows_the_kept_rows_is_not_read(tmp_path):
    path, noise = tmp_path / "$store$_observation_ckpt.0.gz", np.random.default_rng(0).integers(0, 256, (1_000, 84, 84))
    with gzip.open(path, "wb") as file:
        np.save(file, noise.astype(np.uint8))
    path.write_bytes(path.read_bytes()[:5_000_000])  # cut far behind them
    np.testing.assert_array_equal(script.read_rows(path, np.uint8, 50), noise[:50])


def truncate(folder):
    path = folder / "$store$_observation_ckpt.0.gz"
    path.write_bytes(path.read_bytes()[:-100])


def spoil(folder):
    (folder / "$store$_reward_ckpt.0.gz").write_bytes(b"not gzip")


ROWS = logged_rows(60, seed=0)[0]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda f: truncate(f), "$store$_observation_ckpt.0.gz cannot be used: "),
        (lambda f: spoil(f), "$store$_reward_ckpt.0.gz cannot be used: "),
        (lambda f: (f / "$store$_terminal_ckpt.0.gz").unlink(), "No such file or directory: "),
        (
            lambda f: write_file(f, 0, ROWS, action=np.zeros(60, np.int64)),
            "$store$_action_ckpt.0.gz cannot be used: it holds int64 of shape",
        ),
        (
            lambda f: write_file(f, 0, ROWS, observation=np.zeros((60, 84, 80), np.uint8)),
            "$store$_observation_ckpt.0.gz cannot be used: it holds uint8 of shape (60, 84, 80)",
        ),
        (
            lambda f: write_file(f, 0, ROWS, reward=np.zeros(59, np.float32)),
            "$store$_observation_ckpt.0.gz and its companions have [60, 60, 59, 60] rows",
        ),
        (
            lambda f: [path.unlink() for path in f.iterdir()],
            "there is no $store$_*_ckpt.N.gz file with a whole transition in",
        ),
        (lambda f: write_file(f, 0, ROWS[:4]), "there is no $store$_*_ckpt.N.gz file with a whole transition in"),
        (lambda f: write_file(f, 0, ROWS, action=np.int32(3)), "$store$_action_ckpt.0.gz cannot be used: it holds"),
        (lambda f: write_file(f, 1, ROWS), "_ckpt.0.gz has actions from 0 to"),
    ],
)
def test_broken_files_get_one_message_that_names_them(tmp_path, capsys, monkeypatch, prepare, message):
    data, runs = tmp_path / "data", tmp_path / "runs"
    data.mkdir()
    write_file(data, 0, ROWS)
    prepare(data)
    with pytest.raises(SystemExit) as exit_info:
        script.main(Args(dataset_dir=data, runs_dir=runs, features=(2, 3, 3, 4)))
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1
    assert not list(runs.glob("*"))


@pytest.mark.parametrize("script", [script, polyprune_cql_atari], ids=["eaudecql", "polyprune_cql"])
def test_without_a_data_set_both_ways_to_one_are_explained(script, capsys):
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args())
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert "play_policy.py writes with --record-dir" in error
    assert "gs://atari-replay-datasets" in error
