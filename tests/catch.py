"""A pixel game that a small network learns in a minute: catch the ball. Best return 1, random play about -0.6."""

import numpy as np
from gymnasium.spaces import Discrete

GRID, CELL = 7, 12  # 7 x 7 cells of 12 x 12 pixels


class CatchEnv:
    """The part of `ale_py.AtariVectorEnv` that the scripts use, `SameStep` autoreset included."""

    def __init__(self, n_envs: int = 1):
        assert n_envs == 1
        self.single_action_space = Discrete(3)  # stay, left, right

    def reset(self, seed=None):
        self.rng = np.random.default_rng(seed)
        return self.new_episode(), {}

    def new_episode(self):
        self.row, self.column, self.paddle = 0, self.rng.integers(GRID), GRID // 2
        self.stack = np.zeros((1, 4, 84, 84), np.uint8)
        return self.observe()

    def observe(self):
        cells = np.zeros((GRID, GRID), np.uint8)
        cells[self.row, self.column] = cells[GRID - 1, self.paddle] = 255
        self.stack = np.roll(self.stack, -1, axis=1)
        self.stack[0, -1] = np.kron(cells, np.ones((CELL, CELL), np.uint8))
        return self.stack.copy()

    def step(self, actions):
        self.paddle = int(np.clip(self.paddle + (0, -1, 1)[actions[0]], 0, GRID - 1))
        self.row += 1
        done = self.row == GRID - 1
        reward = (1 if self.paddle == self.column else -1) if done else 0
        observation = self.new_episode() if done else self.observe()
        return observation, np.array([reward]), np.array([done]), np.array([False]), {}
