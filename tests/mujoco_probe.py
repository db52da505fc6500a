"""A task whose observations tell where it is: (episode, step). Actions are bounded by -2 and 4.

The scripts know a task of MuJoCo by the name of its module.
"""

import gymnasium
import numpy as np
from gymnasium.spaces import Box


class Probe(gymnasium.Env):
    """Episodes of 5 steps. Those with an odd number end at the time limit, the others in a terminal state."""

    observation_space, action_space = Box(-np.inf, np.inf, (2,)), Box(-2, 4, (2,))

    def __init__(self, reward=1.0):
        self.episode, self.reward, self.actions, self.seeds = -1, reward, [], []

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.seeds.append(seed)
        self.episode, self.step_number = self.episode + 1, 0
        return np.array([self.episode, 0.0]), {}

    def step(self, action):
        self.actions.append(action)
        self.step_number += 1
        done, odd = self.step_number == 5, bool(self.episode % 2)
        return np.array([self.episode, self.step_number]), self.reward, done and not odd, done and odd, {}


gymnasium.register("Probe-v5", Probe)
