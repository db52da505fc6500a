"""The emulator's protocol, in the Atari scripts and in `play_policy.py`, against raw ALE, one frame at a time.

All four scripts have the same `make_env` (tests/test_shared_code.py).
"""

import ale_py
import numpy as np
import pytest
from ale_py import roms

import eaudedqn_atari
import play_policy


def make_envs(env_id, horizon):
    """That of training, and that of the player."""
    return eaudedqn_atari.make_env(env_id, 1, horizon), play_policy.make_atari_env(env_id, horizon)


class RawGame:
    """Of the emulator alone: no wrapper, no preprocessing. Each frame repeats the action before with p = 0.25."""

    def __init__(self, name, seed, sticky=0.25):
        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale = ale_py.ALEInterface()
        self.ale.setInt("random_seed", seed)
        self.ale.setFloat("repeat_action_probability", sticky)
        self.ale.loadROM(roms.get_rom_path(name))
        self.ale.reset_game()
        self.action_set = self.ale.getMinimalActionSet()

    def step(self, action):
        """Four frames: the sum of rewards."""
        reward = sum(self.ale.act(self.action_set[action]) for _ in range(3))
        self.last_but_one = self.ale.getScreenGrayscale()
        return reward + self.ale.act(self.action_set[action])

    def picture(self):
        """What is to be seen after a step."""
        return shrink(np.maximum(self.last_but_one, self.ale.getScreenGrayscale()))


def shrink(screen):
    """(210, 160) to (84, 84): each new pixel is the mean of the area that it covers."""
    rows = np.repeat(screen, 2, axis=0).reshape(84, 5, 160).mean(axis=1)
    return np.repeat(rows, 21, axis=1).reshape(84, 84, 40).mean(axis=2)


def assert_is_seen(picture, observation):
    np.testing.assert_allclose(observation, picture, rtol=0, atol=0.51)  # rounded


def test_episodes_are_those_of_raw_ale_frame_by_frame():
    """Two thousand steps: one more or one less stuck action, skipped frame or no-op would change all that follow."""
    envs, rng = make_envs("SpaceInvaders", 27_000), np.random.default_rng(0)
    n_steps, n_lives_lost, rewards = 0, 0, set()
    for seed in range(3, 7):
        game, over = RawGame("space_invaders", seed), False
        observations = [env.reset(seed=seed)[0] for env in envs]
        picture = shrink(game.ale.getScreenGrayscale())
        for x in observations:
            assert x.shape == (1, 4, 84, 84)
            assert not x[0, :3].any()  # zeros before the first frame, which comes without no-ops and fire
            assert_is_seen(picture, x[0, 3])
        while not over:
            action, before, lives = rng.integers(len(game.action_set)), observations, game.ale.lives()
            reward = game.step(action)
            over = game.ale.game_over()
            steps = [env.step(np.array([action])) for env in envs]
            observations = [step[0].copy() for step in steps]
            assert all(rest == [[reward], [over], [False]] for _, *rest, _ in steps)
            if n_steps % 5 == 0 and not over:  # else it is the first of the next episode
                picture = game.picture()
                for old, new in zip(before, observations):
                    np.testing.assert_array_equal(new[0, :3], old[0, 1:])
                    assert_is_seen(picture, new[0, 3])
            n_lives_lost += not over and game.ale.lives() < lives
            rewards.add(reward)
            n_steps += 1
    assert n_steps > 2_000
    assert n_lives_lost == 8  # and the episode went on
    assert max(rewards) > 5  # not clipped


def test_the_horizon_cuts_an_episode_after_as_many_steps():
    for env in make_envs("SpaceInvaders", 30):
        for seed in (3, 4):
            env.reset(seed=seed)
            for step in range(1, 31):
                observations, _, terminals, truncations, _ = env.step(np.array([0]))
                assert (terminals[0], truncations[0]) == (False, step == 30)
        assert not observations[0, :3].any()  # the first of the next episode


def test_environments_side_by_side_have_seeds_of_their_own():
    env = eaudedqn_atari.make_env("SpaceInvaders", 3, 27_000)
    observations, _ = env.reset(seed=5)
    games = [RawGame("space_invaders", 5 + i) for i in range(3)]
    for action in np.random.default_rng(0).integers(6, size=60):
        rewards = [game.step(action) for game in games]
        observations, rewards_seen, *_ = env.step(np.full(3, action))
        assert rewards_seen.tolist() == rewards
    for game, observation in zip(games, observations):
        assert_is_seen(game.picture(), observation[3])
    assert (observations[0] != observations[1]).any()


@pytest.mark.parametrize(("name", "n_actions"), [("SpaceInvaders", 6), ("MsPacman", 9), ("Breakout", 4)])
def test_the_action_set_is_the_smallest(name, n_actions):
    assert [env.single_action_space.n for env in make_envs(name, 10)] == [n_actions] * 2
