"""A pixel game that a small network learns in a minute: catch the ball. Best return 1, random play about -0.6."""

import numpy as np
from gymnasium.spaces import Discrete

GRID, CELL = 7, 12  # 7 x 7 cells of 12 x 12 pixels
STAY, LEFT, RIGHT = 0, 1, 2


class Catch:
    """One game. The step that ends an episode returns the first observation of the next one."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def new_episode(self):
        self.row, self.column, self.paddle = 0, self.rng.integers(GRID), GRID // 2
        self.stack = np.zeros((4, 84, 84), np.uint8)
        return self.observe()

    def observe(self):
        cells = np.zeros((GRID, GRID), np.uint8)
        cells[self.row, self.column] = cells[GRID - 1, self.paddle] = 255
        self.stack = np.concatenate([self.stack[1:], np.kron(cells, np.ones((1, CELL, CELL), np.uint8))])
        return self.stack

    def step(self, action):
        self.paddle = int(np.clip(self.paddle + {STAY: 0, LEFT: -1, RIGHT: 1}[int(action)], 0, GRID - 1))
        self.row += 1
        done = self.row == GRID - 1
        reward = (1 if self.paddle == self.column else -1) if done else 0
        return self.new_episode() if done else self.observe(), reward, done

    def best_action(self):
        return (STAY, RIGHT, LEFT)[np.sign(self.column - self.paddle)]


class CatchEnv:
    """The part of `ale_py.AtariVectorEnv` that the scripts use."""

    def __init__(self, n_envs: int = 1):
        self.n_envs, self.single_action_space = n_envs, Discrete(3)

    def reset(self, seed):
        self.games = [Catch(seed + i) for i in range(self.n_envs)]
        return np.stack([game.new_episode() for game in self.games]), {}

    def step(self, actions):
        observations, rewards, dones = map(np.array, zip(*[game.step(a) for game, a in zip(self.games, actions)]))
        return observations, rewards, dones, np.zeros(self.n_envs, bool), {}
