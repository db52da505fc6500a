"""The replay memory against one that keeps whole stacks."""

import collections

import numpy as np
import pytest

from eaudedqn_atari import ReplayMemory


class StackMemory:
    """Brute force: the last `size` transitions with both stacks, as a list."""

    def __init__(self, size):
        self.transitions = collections.deque(maxlen=size)

    def add(self, observation, action, reward, terminal, truncated, next_observation):
        self.transitions.append((observation.copy(), action, reward, terminal, truncated, next_observation.copy()))


def frame(number):
    """A frame that says which one it is; never all zero."""
    return np.full((84, 84), 1, np.uint8) + np.resize(np.array([number // 200, number % 200], np.uint8), (84, 84))


def play(n_steps, seed):
    """Random episodes of 1 to 9 steps, one in three cut by the horizon; stacks start with zeros."""
    rng, numbers = np.random.default_rng(seed), iter(range(100_000))

    def first_stack():
        return np.stack([np.zeros((84, 84), np.uint8)] * 3 + [frame(next(numbers))])

    observation, steps_left = first_stack(), rng.integers(1, 10)
    for action in range(n_steps):
        steps_left -= 1
        truncated = steps_left == 0 and bool(rng.random() < 1 / 3)
        terminal = steps_left == 0 and not truncated
        next_observation = np.concatenate([observation[1:], frame(next(numbers))[None]])
        if steps_left == 0:  # the step that ends an episode returns the first observation of the next one
            next_observation, steps_left = first_stack(), rng.integers(1, 10)
        yield observation, action, float(rng.integers(-3, 4)), terminal, truncated, next_observation
        observation = next_observation


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_samples_are_exactly_the_transitions_of_a_memory_of_stacks(size):
    memory, reference = ReplayMemory(size), StackMemory(size)
    rng = np.random.default_rng(0)
    checks = 0
    for n_added, transition in enumerate(play(150, seed=size), 1):
        memory.add(*[np.array([x]) for x in transition])
        reference.add(*transition)
        valid = {action: rest for rest in reference.transitions if not rest[4] for action in [rest[1]]}
        if not valid or (size > 7 and n_added % 10):
            continue
        batch = memory.sample(rng, 20 * size)
        assert set(batch.actions) == set(valid)  # every valid transition, from the oldest to the newest, and no other
        for frames, action, reward, terminal in zip(*batch):
            observation, _, true_reward, true_terminal, _, next_observation = valid[action]
            np.testing.assert_array_equal(frames[:-1], observation)
            assert reward == np.clip(true_reward, -1, 1)
            assert terminal == true_terminal
            if not terminal:
                np.testing.assert_array_equal(frames[1:], next_observation)
        checks += 1
    assert checks > 10


def test_sampling_is_uniform():
    memory = ReplayMemory(5)
    for transition in play(30, seed=1):
        memory.add(*[np.array([x]) for x in transition])
    valid = ~memory.rows["truncations"][(memory.n_added - 1 - np.arange(5)) % len(memory.rows)]
    actions = memory.sample(np.random.default_rng(0), 20_000).actions
    np.testing.assert_allclose(np.unique(actions, return_counts=True)[1], 20_000 / valid.sum(), rtol=0.05)


@pytest.mark.parametrize("n_before", [3, 7, 20, 33])
def test_spare_rows_keep_what_a_checkpoint_refers_to(n_before, tmp_path):
    size, n_spare = 5, 8
    memory, transitions = ReplayMemory(size, n_spare, tmp_path / "replay"), list(play(n_before + n_spare, seed=2))
    for transition in transitions[:n_before]:
        memory.add(*[np.array([x]) for x in transition])
    rows, n_added = memory.rows.copy(), memory.n_added
    expected = memory.sample(np.random.default_rng(0), 200)
    for transition in transitions[n_before:]:  # as many as come before the next checkpoint
        memory.add(*[np.array([x]) for x in transition])
    again = ReplayMemory(size, n_spare, tmp_path / "replay")  # as after a crash
    again.load(rows, n_added, 0)
    for left, right in zip(again.sample(np.random.default_rng(0), 200), expected):
        np.testing.assert_array_equal(left, right)


def test_frames_are_stored_once():
    assert ReplayMemory(1_000).frames.nbytes == 1_004 * 84 * 84
