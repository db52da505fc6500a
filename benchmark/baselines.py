"""Other people's dense agents with our settings, to hold ours against: Stable-Baselines3's DQN on MinAtar, SBX's SAC.

    python3 -m venv /tmp/sb3 && /tmp/sb3/bin/pip install sbx-rl minatar "gymnasium[mujoco]" tyro
    /tmp/sb3/bin/python benchmark/baselines.py --env-id Breakout --seed 1
    /tmp/sb3/bin/python benchmark/baselines.py --env-id HalfCheetah --seed 1

A run writes its curve to `benchmark/results/baselines.csv`, from which `plot.py` makes the table.
"""

import csv
import dataclasses
import fcntl
import sys
from pathlib import Path

import gymnasium
import numpy as np
import tyro

RESULTS = Path(__file__).resolve().parent / "results"
COLUMNS = "study", "variant", "env", "seed", "tag", "step", "value"
GAMES = {"Asterix": "asterix", "Breakout": "breakout", "Freeway": "freeway"}
GAMES |= {"Seaquest": "seaquest", "SpaceInvaders": "space_invaders"}
N_POINTS = 50  # of a curve: means over equal parts of the run


@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "Breakout"  # a game of MinAtar, or a task of MuJoCo
    seed: int = 1  # seed of everything that is random
    total_timesteps: int | None = None  # steps of the run; without it 500_000 on MinAtar and 100_000 on MuJoCo


class Game(gymnasium.Env):
    """A game of MinAtar as `eaudedqn_minatar.py` plays it, for a library that wants channels first."""

    def __init__(self, name: str):
        import minatar

        self.game = minatar.Environment(GAMES[name], sticky_action_prob=0.1, difficulty_ramping=True)
        self.action_set = self.game.minimal_action_set()
        self.action_space = gymnasium.spaces.Discrete(len(self.action_set))
        height, width, n_channels = self.game.state_shape()
        self.observation_space = gymnasium.spaces.Box(0, 1, (n_channels, height, width), np.uint8)

    def observation(self) -> np.ndarray:
        return np.moveaxis(self.game.state().astype(np.uint8), -1, 0)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.game.seed(int(self.np_random.integers(2**30)))
        self.game.reset()
        self.game.last_action = 0
        return self.observation(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        reward, terminal = self.game.act(self.action_set[action])
        return self.observation(), float(reward), terminal, False, {}


class ClippedRewards(gymnasium.RewardWrapper):
    def reward(self, reward: float) -> float:
        return float(np.clip(reward, -1, 1))


class Returns(gymnasium.Wrapper):
    """Keeps (step, return) of every episode, in the game's score."""

    def __init__(self, env: gymnasium.Env):
        super().__init__(env)
        self.points, self.n_steps, self.score = [], 0, 0.0

    def step(self, action):
        observation, reward, terminal, truncation, info = self.env.step(action)
        self.n_steps, self.score = self.n_steps + 1, self.score + reward
        if terminal or truncation:
            self.points.append((self.n_steps, self.score))
            self.score = 0.0
        return observation, reward, terminal, truncation, info


def train_dqn(args: Args, total: int) -> list[tuple[int, float]]:
    """The network, the memory and the number of updates of `polyprune_dqn_minatar.py --final-sparsity 0`.

    What stays the library's own: Huber's loss in place of the squared one, and PyTorch's initial weights.
    """
    import torch
    from stable_baselines3 import DQN
    from stable_baselines3.common.torch_layers import BaseFeaturesExtractor

    class Features(BaseFeaturesExtractor):
        def __init__(self, space):
            super().__init__(space, 128)
            convolution = torch.nn.Conv2d(space.shape[0], 16, 3), torch.nn.ReLU(), torch.nn.Flatten()
            self.layers = torch.nn.Sequential(*convolution, torch.nn.Linear(16 * 64, 128), torch.nn.ReLU())

        def forward(self, observations):
            return self.layers(observations)

    torch.set_num_threads(1)
    env = Returns(gymnasium.wrappers.TimeLimit(Game(args.env_id), 27_000))
    network = {"features_extractor_class": Features, "net_arch": [], "normalize_images": False}
    agent = DQN(
        "CnnPolicy",
        ClippedRewards(env),
        learning_rate=2.5e-4,
        buffer_size=100_000,
        learning_starts=5_000,
        batch_size=32,
        gamma=0.99,
        train_freq=2,
        target_update_interval=2_000,
        exploration_fraction=50_000 / total,
        exploration_final_eps=0.01,
        max_grad_norm=1e9,
        policy_kwargs=network | {"optimizer_kwargs": {"eps": 1.5e-4}},
        seed=args.seed,
    )
    agent.learn(total)
    return env.points


def train_sac(args: Args, total: int) -> list[tuple[int, float]]:
    """Returns of ten deterministic episodes every 10,000 steps, as `polyprune_sac_mujoco.py --final-sparsity 0` has."""
    from sbx import SAC
    from stable_baselines3.common.callbacks import EvalCallback
    from stable_baselines3.common.monitor import Monitor

    train_env, eval_env = [Monitor(gymnasium.make(f"{args.env_id}-v5")) for _ in range(2)]
    kwargs = {"learning_rate": 1e-3, "qf_learning_rate": 1e-3, "learning_starts": 5_000, "seed": args.seed}
    evaluate = EvalCallback(eval_env, eval_freq=10_000, n_eval_episodes=10, log_path=f"/tmp/sbx_{args.seed}")
    SAC("MlpPolicy", train_env, **kwargs).learn(total, callback=evaluate)
    return list(zip(evaluate.evaluations_timesteps, np.mean(evaluate.evaluations_results, axis=1)))


def thin(points: list[tuple[int, float]], total: int) -> list[tuple[int, float]]:
    """The mean over each of N_POINTS equal parts of the run, at its end."""
    parts = [-(-step * N_POINTS // total) for step, _ in points]
    of_part = {part: [x for p, (_, x) in zip(parts, points) if p == part] for part in sorted(set(parts))}
    return [(part * total // N_POINTS, float(np.mean(x))) for part, x in of_part.items()]


def main(args: Args) -> None:
    is_game = args.env_id in GAMES
    total = args.total_timesteps or (500_000 if is_game else 100_000)
    points = thin(train_dqn(args, total), total) if is_game else train_sac(args, total)
    tag = "charts/episodic_return" if is_game else "eval/episodic_return"
    run = "baselines", "sb3" if is_game else "sbx", args.env_id, str(args.seed)
    with open(RESULTS / "baselines.csv", "a+", newline="") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # two runs may end together
        file.seek(0)
        others = [row for row in list(csv.reader(file))[1:] if tuple(row[:4]) != run]
        rows = sorted([*others, *[[*run, tag, step, f"{value:.5g}"] for step, value in points]], key=lambda x: x[:4])
        file.truncate(0)
        csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    print(f"{args.env_id}, seed {args.seed}: {points[-1][1]:.5g} at the end", file=sys.stderr)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
