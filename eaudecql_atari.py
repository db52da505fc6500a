# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py>=0.12", "flax>=0.12", "gymnasium>=1.2", "imageio>=2.34", "jax>=0.10", "numpy>=2",
#     "optax>=0.2.5", "rich>=14", "tensorboard>=2.20", "tyro>=1.0"]
# ///
"""EauDeCQL on Atari, offline: Q-networks of growing sparsity learn from logged play; the best is the next target.

Algorithm 1 of Vincent et al., "Eau De Q-Network: Adaptive Distillation of Neural Networks in Deep Reinforcement
Learning", 2025, with the loss of Conservative Q-Learning (Kumar et al., 2020). Here a step is a gradient step.

    python eaudecql_atari.py --env-id Pong --dataset-dir data/Pong
    tensorboard --logdir runs
"""

import collections
import contextlib
import dataclasses
import datetime
import difflib
import fcntl
import functools
import gzip
import hashlib
import io
import json
import math
import os
import pickle
import re
import shutil
import signal
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import ale_py
import flax.linen as nn
import flax.traverse_util
import gymnasium
import imageio.v3 as imageio
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.progress import BarColumn, Progress
from tensorboard.summary import Writer

FRAME, STACK = (84, 84), 4  # pixels of a frame, frames of an observation
LOG_PERIOD = 1_000  # steps between two points of the curves that have a value at every step


# ---- Arguments: the defaults are the paper's, where it has them ------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "Pong"  # what to play: Pong or ALE/Pong-v5 on Atari, Ant or Ant-v5 on MuJoCo
    seed: int = 1  # seed of everything that is random
    total_timesteps: int = 3_125_000  # steps of the run: in the environment online, of the gradient offline [t_final]
    runs_dir: Path = Path("runs")  # folder in which the run gets a folder of its own
    checkpoint_period: int = 250_000  # steps between two checkpoints, from which the run can go on; 0 writes none
    resume: Path | None = None  # folder of a run to go on with, under its own flags
    evaluate: Path | None = None  # policy.npz to play, instead of training
    capture_video: Path | None = None  # .gif file for the first episode of --evaluate
    horizon: int = 27_000  # steps after which an episode is cut [H]
    features: tuple[int, int, int, int] = (32, 64, 64, 512)  # channels of the 3 convolutions, width of the hidden layer
    n_networks: int = 5  # online networks that learn side by side [K]
    tournament_size: int = 3  # networks drawn for a tournament, which the lowest cumulated loss wins [M]
    max_noise: float = 3.0  # a pruning's size is scaled by a random number from 0 to this; 0 never prunes [U_max]
    max_speed: float = 0.01  # largest share of the remaining weights that one pruning removes [S_max]
    sparsity_distribution: Literal["uniform", "erk"] = "uniform"  # same sparsity in all tensors, or Erdos-Renyi-Kernel
    target_period: int = 2_000  # steps between two target updates [T]
    batch_size: int = 32  # transitions in a gradient step [B]
    gamma: float = 0.99  # discount factor [gamma]
    learning_rate: float = 5e-5  # step size of Adam
    adam_epsilon: float = 3.125e-4  # epsilon of Adam
    cql_alpha: float = 0.1  # weight of the conservative term beside the squared error; 0 is plain offline DQN
    dataset_dir: Path | None = None  # folder of the $store$_*_ckpt.N.gz files of one game
    kept_rows: int = 50_000  # rows read from the start of each file
    files_in_memory: int = 5  # files that batches are drawn from; others take their place after each epoch
    epoch_steps: int = 62_500  # gradient steps of an epoch, which ends with an evaluation
    eval_episodes: int = 10  # episodes of an evaluation, played side by side
    eval_epsilon: float = 0.01  # share of random actions in an evaluation


# Whole numbers are at least 1, others between 0 and 1, but for these limits. In a pair the first is not the smaller.
LIMITS = {"seed": (0, 2**31 - 1), "checkpoint_period": (0, math.inf), "horizon": (2, 2**29 - 1)}
LIMITS |= {"features": (1, math.inf), "kept_rows": (5, math.inf), "max_noise": (0, 1e9), "cql_alpha": (0, 1e9)}
PAIRS = {"n_networks": "tournament_size", "total_timesteps": "epoch_steps"}


def fail(message: str) -> NoReturn:
    """A mistake of the person at the keyboard: one message, exit code 2, no traceback."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_args(args: Args) -> None:
    for field in dataclasses.fields(args):
        flag, value = "--" + field.name.replace("_", "-"), getattr(args, field.name)
        limits = LIMITS.get(field.name, {int: (1, math.inf), float: (0, 1)}.get(field.type))
        if limits and not all(limits[0] <= x <= limits[1] for x in np.ravel(value)):
            at_most = "" if limits[1] == math.inf else f" and at most {limits[1]}"
            fail(f"{flag} must be at least {limits[0]}{at_most}, not {value}")
        if field.name in PAIRS and value < getattr(args, other := PAIRS[field.name]):
            fail(f"{flag} {value} is smaller than --{other.replace('_', '-')} {getattr(args, other)}")
    if (video := args.capture_video) and not (args.evaluate and video.suffix == ".gif" and video.parent.is_dir()):
        fail(f"--capture-video {video} must be a .gif file in a folder that exists, and goes with --evaluate")


# ---- Environment -----------------------------------------------------------------------------------------------------
def env_name(env_id: str) -> str:
    """The game as people write it: `ALE/MsPacman-v5`, `mspacman` and `ms_pacman` are all `MsPacman`."""
    known = {spec.name.lower(): spec.name for spec in gymnasium.registry.values() if spec.namespace == "ALE"}
    wanted = re.sub(r"^ale/|(noframeskip)?-v\d+$|_", "", env_id.lower())
    if wanted not in known:
        closest = [known[name] for name in difflib.get_close_matches(wanted, known, n=3, cutoff=0)]
        fail(f"unknown Atari game {env_id!r}; the closest names are {', '.join(closest)}")
    return known[wanted]


def make_env(env_id: str, n_envs: int, horizon: int, colour: bool = False) -> ale_py.AtariVectorEnv:
    """The protocol of Machado et al. (2018), as in the paper's appendix. Several defaults of ale-py differ."""
    return ale_py.AtariVectorEnv(
        gymnasium.spec(f"ALE/{env_name(env_id)}-v5").kwargs["game"],
        num_envs=n_envs,
        max_num_frames_per_episode=4 * horizon,
        repeat_action_probability=0.25,  # sticky actions
        full_action_space=False,
        autoreset_mode="SameStep",  # the step that ends an episode returns the first observation of the next one
        img_height=210 if colour else FRAME[0],
        img_width=160 if colour else FRAME[1],
        grayscale=not colour,
        stack_num=STACK,  # zeros before the first frame of an episode
        frameskip=4,
        maxpool=True,  # over the last two frames
        noop_max=0,
        episodic_life=False,  # game over, not the loss of a life, ends an episode
        reward_clipping=False,  # the replay memory clips; returns are the game's score
        use_fire_reset=False,
    )


# ---- Replay data -----------------------------------------------------------------------------------------------------
class Batch(NamedTuple):
    frames: np.ndarray  # (batch, STACK + 1, 84, 84) uint8: [:, :-1] is the observation, [:, 1:] the next one
    actions: np.ndarray  # (batch,) int32
    rewards: np.ndarray  # (batch,) float32
    terminals: np.ndarray  # (batch,) bool


REPLAY_MEMBERS = {"observation": np.uint8, "action": np.int32, "reward": np.float32, "terminal": np.uint8}
ReplayFile = collections.namedtuple("ReplayFile", [*REPLAY_MEMBERS, "valid"])  # valid: the rows that can be sampled
NO_DATASET = """--dataset-dir is missing, a folder of $store$_*_ckpt.N.gz files: public ones from
gs://atari-replay-datasets (see the README), or your own from
python polyprune_dqn_atari.py --final-sparsity 0 --env-id Pong --record-dir data/Pong"""


def read_rows(path: Path, dtype: type, n_rows: int) -> np.ndarray:
    """The first rows of a gzipped `np.save` stream. What follows them is never decompressed."""
    try:
        with gzip.open(path) as file:
            np.lib.format.read_magic(file)
            shape, _, found = np.lib.format.read_array_header_1_0(file)
            if found != dtype or not shape or shape[1:] != (FRAME if "observation" in path.name else ()):
                raise ValueError(f"it holds {found} of shape {shape}")
            rows = np.empty((min(n_rows, shape[0]), *shape[1:]), dtype)
            for block in np.array_split(rows, rows.nbytes // 10_000_000 + 1):  # 10 MB at a time
                block[:] = np.frombuffer(file.read(block.nbytes), dtype).reshape(block.shape)
            return rows
    except (OSError, EOFError, ValueError, zlib.error) as error:
        raise OSError(f"{path} cannot be used: {error}") from error


def valid_rows(terminals: np.ndarray) -> np.ndarray:
    """The stack and the frame that follows are in the file, and no episode ends in the stack before its last frame."""
    rows = np.arange(STACK - 1, len(terminals) - 1)
    for back in range(1, STACK):  # three rows of zeros come before each episode, so its first stacks are like any other
        rows = rows[terminals[rows - back] == 0]
    return rows


def load_file(args: Args, number: int, n_actions: int) -> ReplayFile:
    paths = [args.dataset_dir / f"$store$_{name}_ckpt.{number}.gz" for name in REPLAY_MEMBERS]
    columns = [read_rows(path, dtype, args.kept_rows) for path, dtype in zip(paths, REPLAY_MEMBERS.values())]
    _, actions, _, terminals = columns
    if len({len(column) for column in columns}) > 1:
        raise OSError(f"{paths[0]} and its companions have {[len(column) for column in columns]} rows")
    if not np.isin(actions, np.arange(n_actions)).all():
        raise OSError(f"{paths[1]} has actions from {actions.min()} to {actions.max()}, the game only {n_actions}")
    return ReplayFile(*columns, valid_rows(terminals))


class ReplayData:
    """Some files of the DQN Replay data set (Agarwal et al., 2020); a thread reads the next ones meanwhile."""

    def __init__(self, args: Args, rng: np.random.Generator, n_actions: int, saved: dict | None = None):
        self.args, self.rng, self.n_actions, self.chosen, self.reading = args, rng, n_actions, [], []
        folder = args.dataset_dir or fail(NO_DATASET)
        names = " ".join(path.name for path in folder.glob("$store$_*_ckpt.*.gz"))
        numbers = np.unique([int(number) for number in re.findall(r"_ckpt\.(\d+)\.gz", names)])
        paths = [folder / f"$store$_{name}_ckpt.{k}.gz" for name in REPLAY_MEMBERS for k in numbers]
        if missing := [path for path in paths if not path.exists()]:
            fail(f"{missing[0]} is missing")
        terminals = {k: read_rows(folder / f"$store$_terminal_ckpt.{k}.gz", np.uint8, args.kept_rows) for k in numbers}
        self.numbers = np.array([k for k in numbers if len(valid_rows(terminals[k]))])
        if not len(self.numbers):
            fail(f"there is no $store$_*_ckpt.N.gz file with a whole transition in {folder}")
        if saved and not np.array_equal(self.numbers, saved["numbers"]):
            fail(f"{folder} has other files than when the run was started")
        self.reader = ThreadPoolExecutor(max_workers=1)
        for chosen in saved["chosen"] if saved else (None, None):  # the files in memory, the next ones
            self.next_files(chosen)

    def next_files(self, chosen: np.ndarray | None = None) -> None:
        """Take what was read, and read the next files: not the same ones, if there are enough."""
        self.files = [future.result() for future in self.reading]
        n_files, others = min(self.args.files_in_memory, len(self.numbers)), np.setdiff1d(self.numbers, self.chosen)
        drawn = self.rng.choice(others if len(others) >= n_files else self.numbers, n_files, replace=False)
        self.in_memory, self.chosen = self.chosen, drawn if chosen is None else chosen
        self.reading = [self.reader.submit(load_file, self.args, k, self.n_actions) for k in self.chosen]

    def sample(self, batch_size: int) -> Batch:
        sizes = np.array([len(file.valid) for file in self.files])
        file = self.files[self.rng.choice(len(sizes), p=sizes / sizes.sum())]
        row = self.rng.choice(file.valid, batch_size)
        frames = file.observation[row[:, None] + np.arange(1 - STACK, 2)]  # (batch, STACK + 1, 84, 84)
        return Batch(frames, file.action[row], file.reward[row], file.terminal[row] == 1)


# ---- Network ---------------------------------------------------------------------------------------------------------
def xavier_uniform(key: jax.Array, shape: tuple[int, ...], dtype: type) -> jax.Array:
    """Drawn flat, since XLA needs up to ten times as long to compile a draw with four axes: 16 s at the start."""
    fan_in, fan_out = (math.prod(shape[:-2]) * n for n in shape[-2:])
    limit = math.sqrt(6 / (fan_in + fan_out))
    return jax.random.uniform(key, (math.prod(shape),), dtype, -limit, limit).reshape(shape)


class QNetwork(nn.Module):
    features: tuple[int, ...]
    n_actions: int

    def setup(self):
        shapes = zip(self.features[:3], (8, 4, 3), (4, 2, 1))  # from 84 x 84 pixels to 21 x 21, 11 x 11, 11 x 11
        convolution = functools.partial(nn.Conv, kernel_init=xavier_uniform)
        self.convolutions = [convolution(n, (size, size), s, name=f"Conv_{i}") for i, (n, size, s) in enumerate(shapes)]
        self.hidden = nn.Dense(self.features[3], kernel_init=xavier_uniform, name="Dense_0")
        self.output = nn.Dense(self.n_actions, kernel_init=xavier_uniform, name="Dense_1")

    def torso(self, observations: jax.Array) -> jax.Array:
        x = jnp.moveaxis(observations, 1, -1) / 255.0  # (batch, 84, 84, STACK)
        for convolution in self.convolutions:
            x = nn.relu(convolution(x))
        return x.reshape(len(x), -1)  # (batch, 121 * features[2])

    def head(self, x: jax.Array) -> jax.Array:
        return self.output(nn.relu(self.hidden(x)))  # (batch, n_actions)

    def __call__(self, observations: jax.Array) -> jax.Array:
        return self.head(self.torso(observations))


# ---- Pruning ---------------------------------------------------------------------------------------------------------
def tensor_densities(shapes: list[tuple], sparsity: float, distribution: str) -> np.ndarray:
    """Share of its weights that each tensor keeps."""
    if distribution == "uniform":
        return np.full(len(shapes), 1.0 - sparsity)
    # Erdos-Renyi-Kernel: density in proportion to sum(shape) / prod(shape), at most 1, and `sparsity` in total.
    sizes, sums = np.array([math.prod(shape) for shape in shapes]), np.array([sum(shape) for shape in shapes])
    dense = np.zeros(len(shapes), bool)
    for _ in shapes:
        scale = ((1.0 - sparsity) * sizes.sum() - sizes[dense].sum()) / max(sums[~dense].sum(), 1)
        dense |= scale * sums > sizes
    return np.where(dense, 1.0, scale * sums / sizes)


def magnitude_mask(weights: np.ndarray, density: float) -> np.ndarray:
    """Keep the largest magnitudes, at least one; of equal ones those that come first."""
    n_kept = max(1, round(weights.size * density))
    magnitudes = np.abs(weights).ravel()
    threshold = np.partition(magnitudes, -n_kept)[-n_kept]
    mask = magnitudes > threshold
    mask[np.flatnonzero(magnitudes == threshold)[: n_kept - mask.sum()]] = True
    return mask.reshape(weights.shape)


def magnitude_masks(params, sparsity: float, distribution: str):
    """Masks of one network: True is kept. Only tensors with more than one axis are pruned, biases never."""
    leaves, structure = jax.tree.flatten(params)
    shapes = [leaf.shape for leaf in leaves if leaf.ndim > 1]
    densities = iter(tensor_densities(shapes, sparsity, distribution))
    masks = [magnitude_mask(np.asarray(x), next(densities)) if x.ndim > 1 else np.ones(x.shape, bool) for x in leaves]
    return jax.tree.unflatten(structure, masks)


def sparsity_of(masks) -> float:
    """Share of zeros among the weights of one network that can be pruned."""
    prunable = [np.asarray(mask) for mask in jax.tree.leaves(masks) if mask.ndim > 1]
    return float(1 - sum(mask.sum() for mask in prunable) / sum(mask.size for mask in prunable))


def next_sparsity(sparsity, noise, step: int, next_step: int, total_steps: int, max_speed: float) -> float:
    """Eq. (3): a random stretch along the line from (step, sparsity) to (total_steps, 1), capped by `max_speed`."""
    steps_left = max(total_steps - step, 1)  # at the last update the line is vertical, and the cap decides
    return sparsity + (1 - sparsity) * min((next_step - step) / steps_left * noise, max_speed)


def select_population(rng: np.random.Generator, losses: np.ndarray, tournament_size: int) -> np.ndarray:
    """Fig. 3, left: `parents`, by slot. Selected networks keep theirs; their further seats are slots of the others."""
    losses = np.asarray(losses)
    finite = np.flatnonzero(np.isfinite(losses))
    selected = [finite[losses[finite].argmin()]]  # one seat for the lowest loss, the others for tournament winners
    for _ in range(len(losses) - 1):
        drawn = rng.choice(finite, min(tournament_size, len(finite)), replace=False)
        selected.append(drawn[losses[drawn].argmin()])
    survivors, first_seats = np.unique(selected, return_index=True)
    parents = np.arange(len(losses))
    parents[np.setdiff1d(parents, survivors)] = np.delete(selected, first_seats)
    return parents


# ---- Agent state -----------------------------------------------------------------------------------------------------
class AgentState(NamedTuple):
    """All that learning changes. The population is the leading axis, K."""

    params: dict  # (K, ...), pruned weights are exactly 0 [theta]
    target_params: dict  # (...), shared by all networks [theta-bar]
    opt_state: optax.OptState  # (K, ...)
    masks: dict  # (K, ...) bool, False where a weight is pruned
    cumulated_losses: jax.Array  # (K,), since the last target update [L_k]
    sparsities: jax.Array  # (K,) [s_t]
    target_idx: jax.Array  # (), the network that the target was copied from [psi]


def make_optimizer(args: Args) -> optax.GradientTransformation:
    return optax.adam(args.learning_rate, eps=args.adam_epsilon)


def network_at(stacked, idx):
    """What is at `idx` in all tensors of a tree: one network of a population, or one of each critic's."""
    return jax.tree.map(lambda x: x[idx], stacked)


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_agent(args: Args, network: QNetwork, key: jax.Array) -> AgentState:
    init_keys = jax.random.split(key, args.n_networks)
    params = jax.vmap(network.init, in_axes=(0, None))(init_keys, np.zeros((1, STACK, *FRAME), np.uint8))
    return AgentState(
        params=params,
        target_params=network_at(params, 0),
        opt_state=jax.vmap(make_optimizer(args).init)(params),
        masks=jax.tree.map(lambda x: jnp.ones(x.shape, bool), params),
        cumulated_losses=jnp.zeros(args.n_networks),
        sparsities=jnp.zeros(args.n_networks),
        target_idx=jnp.asarray(0),
    )


# ---- Learning --------------------------------------------------------------------------------------------------------
def population_q_values(network: QNetwork, params, observations: jax.Array) -> jax.Array:
    """(K, batch, n_actions). On a CPU, where a vmapped convolution takes twice the time, the torsos are a loop."""
    if jax.default_backend() != "cpu":
        return jax.vmap(network.apply, in_axes=(0, None))(params, observations)
    n_networks = len(jax.tree.leaves(params)[0])
    torsos = [network.apply(network_at(params, k), observations, method="torso") for k in range(n_networks)]
    return jax.vmap(functools.partial(network.apply, method="head"))(params, jnp.stack(torsos))


def cql_loss(all_q_values: jax.Array, batch: Batch, targets: jax.Array, alpha: float) -> tuple[jax.Array, jax.Array]:
    """`all_q_values` (..., batch, n_actions): of one network or of a population, each of which has its own loss."""
    q_values = all_q_values[..., jnp.arange(len(targets)), batch.actions]  # (..., batch)
    conservative = jax.nn.logsumexp(all_q_values, axis=-1) - q_values  # (..., batch)
    # DIFFERS: the mean over the batch; the paper's algorithms write the sum.
    return jnp.mean((targets - q_values) ** 2 + alpha * conservative, axis=-1), jnp.mean(q_values, axis=-1)


def learn(args: Args, network: QNetwork, state: AgentState, batch: Batch) -> tuple[AgentState, dict]:
    """Alg. 1, l. 8-11: one gradient step of every network towards the shared target."""
    next_values = network.apply(state.target_params, batch.frames[:, 1:]).max(axis=1)  # (batch,)
    targets = batch.rewards + args.gamma * (1 - batch.terminals) * next_values  # l. 8

    def loss(params):
        all_q_values = population_q_values(network, params, batch.frames[:, :-1])  # (K, batch, n_actions)
        losses, q_values = cql_loss(all_q_values, batch, targets, args.cql_alpha)  # (K,)
        return losses.sum(), (losses, q_values)  # of the sum, each network's gradient is that of its own loss

    grads, (losses, q_values) = jax.grad(loss, has_aux=True)(state.params)  # l. 9-10
    updates, opt_state = jax.vmap(make_optimizer(args).update)(grads, state.opt_state)  # l. 11
    params = optax.apply_updates(state.params, updates)
    params = jax.tree.map(jnp.multiply, params, state.masks)  # what was pruned stays pruned

    cumulated_losses = state.cumulated_losses + jnp.where(jnp.isfinite(losses), losses, jnp.inf)
    state = state._replace(params=params, opt_state=opt_state, cumulated_losses=cumulated_losses)
    return state, {"losses/cql_loss": losses.mean(), "losses/q_values": q_values.mean()}


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def learn_many(args: Args, network: QNetwork, state: AgentState, batches: Batch) -> tuple[AgentState, dict]:
    """Many gradient steps in one call, `batches` being stacked. For a single one there is no loop."""
    if len(batches.actions) == 1:
        return learn(args, network, state, jax.tree.map(lambda x: x[0], batches))
    state, metrics = jax.lax.scan(functools.partial(learn, args, network), state, batches)
    return state, jax.tree.map(lambda x: x[-1], metrics)


@functools.partial(jax.jit, donate_argnums=0)
def update_target(state: AgentState) -> AgentState:
    """Alg. 1, l. 13."""
    target_idx = state.cumulated_losses.argmin()
    return state._replace(target_idx=target_idx, target_params=network_at(state.params, target_idx))


def prune_copies(args: Args, rng: np.random.Generator, state: AgentState, parents: np.ndarray, step: int) -> AgentState:
    """Alg. 1, l. 15: the duplicated networks are pruned to a sparsity drawn by Eq. (3), all others stay as they are."""
    fields = "params", "opt_state", "masks", "sparsities"
    population = jax.tree.map(np.array, [getattr(state, field) for field in fields])  # numpy ranks weights faster
    for k in np.flatnonzero(parents != np.arange(args.n_networks)):
        params, _, _, sparsity = network_at(population, parents[k])
        noise, next_step = rng.uniform(0, args.max_noise), step + args.target_period
        sparsity = next_sparsity(float(sparsity), noise, step, next_step, args.total_timesteps, args.max_speed)
        masks = magnitude_masks(params, sparsity, args.sparsity_distribution)
        params = jax.tree.map(np.multiply, params, masks)
        copy = params, make_optimizer(args).init(params), masks, sparsity  # copies start a new Adam
        for tensor, value in zip(jax.tree.leaves(population), jax.tree.leaves(copy)):
            tensor[k] = value
    return state._replace(**dict(zip(fields, jax.device_put(population))))


# ---- Acting ----------------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnums=0)
def greedy_actions(network: QNetwork, params, observations: np.ndarray) -> jax.Array:
    return network.apply(params, observations).argmax(axis=1)


def evaluate(args: Args, rng: np.random.Generator, network: QNetwork, params) -> np.ndarray:
    """Returns of whole episodes, one in each environment, in the game's score."""
    env, episode = make_env(args.env_id, args.eval_episodes, args.horizon), [int(rng.integers(2**30))]
    observations, _ = env.reset(seed=episode[0])
    returns, playing = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, bool)
    while playing.any():
        actions = np.array(greedy_actions(network, params, observations))
        explore = rng.random(args.eval_episodes) < args.eval_epsilon
        actions[explore] = rng.integers(network.n_actions, size=explore.sum())
        if playing[0]:
            episode.append(actions[:1])
        observations, rewards, terminals, truncations, _ = env.step(actions)
        returns += rewards * playing
        playing &= ~(terminals | truncations)
    if args.capture_video:  # the first episode again, in colour: its seed and its actions lead to the same game
        env = make_env(args.env_id, 1, args.horizon, colour=True)
        frames = [env.reset(seed=episode[0])[0][0, -1]] + [env.step(actions)[0][0, -1] for actions in episode[1:-1]]
        imageio.imwrite(args.capture_video, frames, duration=70, loop=0)  # ms, almost as in the game: 15 steps a second
    return returns


# ---- Saving: policy, checkpoint, run folder, TensorBoard, screen -----------------------------------------------------
POLICY, CHECKPOINT = f"policy for *_{Path(__file__).stem.split('_')[-1]}.py", f"checkpoint of {Path(__file__).name}"


def write_file(path: Path, kind: str, write) -> None:
    """There as a whole or not at all, with a digest at its end: of the content, and of what kind of file it is."""
    temporary = path.with_name(f"{path.name}.tmp")
    with open(temporary, "w+b") as file:
        write(file)
        file.seek(0)
        file.write(hashlib.file_digest(file, lambda: hashlib.blake2b(kind.encode())).digest())
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_file(path: Path, kind: str) -> memoryview:
    data, digest = memoryview(path.read_bytes()), hashlib.blake2b(kind.encode())
    digest.update(data[:-64])
    if digest.digest() != data[-64:]:
        fail(f"{path} is not a {kind}, or it is damaged")
    return data[:-64]


def save_policy(path: Path, args: Args, step: int, networks: dict) -> None:
    """Of each tensor the weights that are not zero, and a bit for every weight that says whether it is one of them."""
    networks = jax.device_get(networks)
    tensors = flax.traverse_util.flatten_dict(networks, sep="/")
    if not all(np.isfinite(x).all() for x in tensors.values()):
        fail(f"the networks have diverged by step {step}; try a lower --learning-rate")
    about = {"script": Path(__file__).stem, "env_id": env_name(args.env_id), "step": step}
    about |= {name: value for name, value in dataclasses.asdict(args).items() if name.endswith("features")}
    about["sparsity"] = {name: sparsity_of(jax.tree.map(lambda x: x != 0, x)) for name, x in networks.items()}
    about["shapes"] = {name: x.shape for name, x in tensors.items()}
    arrays = {f"{name}/mask": np.packbits(x != 0) for name, x in tensors.items()}
    arrays |= {f"{name}/weights": x[x != 0] for name, x in tensors.items()}
    write_file(path, POLICY, lambda file: np.savez_compressed(file, about=json.dumps(about), **arrays))


def load_policy(path: Path) -> tuple[dict, dict]:
    """What the file says about the policy, and its networks."""
    arrays = np.load(io.BytesIO(read_file(path, POLICY)))
    about = json.loads(str(arrays["about"]))
    tensors = {name: np.zeros(shape, np.float32) for name, shape in about["shapes"].items()}
    for name, x in tensors.items():
        x[np.unpackbits(arrays[f"{name}/mask"], count=x.size).reshape(x.shape) == 1] = arrays[f"{name}/weights"]
    return about, flax.traverse_util.unflatten_dict(tensors, sep="/")


def lock_folder(folder: Path):
    """A file that is locked until it is closed: one process for a run."""
    lock = open(folder / "args.json", "r+")  # noqa: SIM115 ("r+", as NFS locks no other)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fail(f"another process is at work on {folder}")
    return lock


def load_run(args: Args) -> tuple[Args, dict]:
    """With --resume, the flags of that run and its checkpoint."""
    if not args.resume:
        return args, {}
    if args != Args(resume=args.resume):
        fail("--resume goes on with the run's own flags: leave out all others")
    lock = lock_folder(args.resume)
    saved = pickle.loads(read_file(args.resume / "checkpoint", CHECKPOINT)) | {"lock": lock}
    if saved["step"] == saved["args"]["total_timesteps"]:
        (args.resume / "replay").unlink(missing_ok=True)
        print(f"{args.resume} is finished: all its {saved['step']:,} steps are done")
        sys.exit()
    for path, size in ((args.resume / name, size) for name, size in saved["files"].items()):
        if not path.exists() or path.stat().st_size < size:
            fail(f"{path} is missing, or smaller than when the checkpoint was written")
    return Args(**saved["args"] | {"resume": args.resume}), saved


class Run:
    """A run as a person sees it: its folder, its TensorBoard curves and its progress on the screen."""

    def __init__(self, args: Args, header: str, saved: dict):
        self.args, self.stop_signal, self.stops = args, None, False
        run_name = f"{env_name(args.env_id)}__{Path(__file__).stem}__{args.seed}__{time.time():.3f}"
        self.folder = args.resume or args.runs_dir / run_name
        if not saved:
            self.folder.mkdir(parents=True)
            (self.folder / "args.json").write_text(json.dumps(dataclasses.asdict(args), indent=2, default=str))
        for path in self.folder.glob("events*"):  # what was logged after the checkpoint comes again
            os.truncate(path, saved["files"].get(path.name, 0))
        self.lock = saved.get("lock") or lock_folder(self.folder)
        self.old_handlers = {x: signal.signal(x, self.interrupt) for x in (signal.SIGINT, signal.SIGTERM)}
        self.writer, self.step, self.latest = Writer(str(self.folder)), saved.get("step", 0), saved.get("latest", {})
        self.returns = saved.get("returns", [])  # of all episodes
        self.rewards = saved.get("rewards", [])  # of the current episode
        self.shown, self.opened = time.monotonic(), (self.step, time.monotonic())
        self.clock = None  # the step and the time from which SPS counts
        print(f"{header}\nRun folder {self.folder}" + f", resumed after {self.step:,} steps" * bool(saved), flush=True)
        self.progress = Progress(BarColumn(bar_width=20), "{task.description}", disable=not sys.stdout.isatty())
        self.task = self.progress.add_task("", total=args.total_timesteps)
        self.progress.start()

    def interrupt(self, signum: int, _) -> None:
        self.stop_signal = signum  # the run ends after its current step
        signal.signal(signal.SIGINT, self.old_handlers[signal.SIGINT])  # now Ctrl-C ends it at once

    def close(self) -> None:
        self.progress.stop()
        self.writer.close()
        self.lock.close()
        for signum, handler in self.old_handlers.items():
            signal.signal(signum, handler)
        if self.step == 0:  # the run could not start
            shutil.rmtree(self.folder)

    def steps(self, stride: int = 1):
        while self.step < self.args.total_timesteps and not self.stops:
            self.step += stride
            yield self.step
            if time.monotonic() - self.shown > (30 if self.progress.disable else 0.5):  # seconds
                self.show()
        self.show()

    def saves(self) -> bool:
        """Whether to save after this step: every so often, after the last one, and when a signal has come."""
        last, due = self.step == self.args.total_timesteps, self.step % (self.args.checkpoint_period or math.inf) == 0
        self.stops = self.stop_signal is not None and not last  # a signal that comes later than this waits for a step
        return due or last or self.stops

    def save(self, networks: dict, rng: np.random.Generator, state, **parts) -> None:
        """The policy, and the checkpoint: all that it takes to go on as if the run had never stopped."""
        save_policy(self.folder / "policy.npz", self.args, self.step, networks)
        if self.args.checkpoint_period == 0:
            return
        self.writer.flush()
        files = [*self.folder.glob("events*"), *self.folder.glob("replay")]
        for path in files:
            with open(path, "rb+") as file:
                os.fsync(file.fileno())  # they too have to outlive the machine
        parts |= {"args": dataclasses.asdict(self.args), "files": {path.name: path.stat().st_size for path in files}}
        parts |= {"rng": rng.bit_generator.state, "state": jax.device_get(jax.tree.leaves(state))}
        parts |= {name: getattr(self, name) for name in ("step", "latest", "returns", "rewards")}
        write_file(self.folder / "checkpoint", CHECKPOINT, lambda file: pickle.dump(parts, file, protocol=5))
        if self.step == self.args.total_timesteps:
            (self.folder / "replay").unlink(missing_ok=True)

    def log(self, scalars: dict) -> None:
        """A number gives one curve, a vector gives `tag_0`, `tag_1`, ..."""
        for tag, value in scalars.items():
            self.latest[tag] = np.array(value)  # a copy: the next update reuses the memory of the state
            for k, x in enumerate(np.ravel(value)):
                self.writer.add_scalar(f"{tag}_{k}" if np.ndim(value) else tag, x, self.step)

    def sps(self) -> float:
        first_step, start = self.clock if self.clock and self.clock[0] < self.step else self.opened
        return (self.step - first_step) / max(time.monotonic() - start, 1e-9)

    def show(self) -> None:
        self.shown, seconds_left = time.monotonic(), (self.args.total_timesteps - self.step) / max(self.sps(), 1e-3)
        time_left = datetime.timedelta(seconds=int(seconds_left))
        status = f"{self.step:,}/{self.args.total_timesteps:,} steps, {self.sps():,.1f} SPS, {time_left} left\n"
        status += f"return {np.mean(self.returns[-100:]):.1f}" if self.returns else "return -"
        for name, tag in (("sparsity", "sparsity/target"), ("epsilon", "charts/epsilon")):
            status += f", {name} {self.latest[tag]:.3f}" if tag in self.latest else ""
        self.progress.update(self.task, completed=self.step, description=status)
        if self.progress.disable:
            print(status.replace("\n", ", "), flush=True)

    def summarize(self, params) -> None:
        weights = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])
        print(f"{'Interrupted' if self.stops else 'Finished'} after {self.step:,} steps")
        print(f"Target with {np.count_nonzero(weights):,} non-zero weights of {weights.size:,}")
        if self.stops and self.args.checkpoint_period:
            print(f"python {sys.argv[0]} --resume {self.folder}")
        print(f"python {sys.argv[0]} --evaluate {self.folder}/policy.npz")
        print(f"tensorboard --logdir {self.folder.parent}")


def play_policy(args: Args) -> None:
    check_args(args)
    about, networks = load_policy(args.evaluate)
    network = QNetwork(tuple(about["features"]), about["shapes"]["target/params/Dense_1/bias"][0])
    args = dataclasses.replace(args, env_id=about["env_id"])
    returns = evaluate(args, np.random.default_rng(args.seed), network, networks["target"])
    sparsities = ", ".join(f"{name} {sparsity:.3f}" for name, sparsity in about["sparsity"].items())
    print(f"{about['env_id']}, {about['script']}.py after {about['step']:,} steps, sparsity of {sparsities}")
    print(f"Return {returns.mean():.1f} +- {returns.std():.1f}, mean and standard deviation of {len(returns)} episodes")
    print("Each:", *np.round(returns, 1))


# ---- Training --------------------------------------------------------------------------------------------------------
def train(args: Args) -> Path:
    args, saved = load_run(args)
    check_args(args)
    rng = np.random.default_rng(args.seed)
    network = QNetwork(args.features, int(make_env(args.env_id, n_envs=1, horizon=args.horizon).single_action_space.n))
    data = ReplayData(args, rng, network.n_actions, saved.get("data"))
    state = init_agent(args, network, jax.random.key(args.seed))  # Alg. 1, l. 1
    n_weights = sum(x.size for x in jax.tree.leaves(state.target_params))
    header = (
        f"EauDeCQL on {env_name(args.env_id)}, seed {args.seed}, on the {jax.default_backend().upper()}\n"
        f"{args.n_networks} networks of {n_weights:,} parameters, features {args.features}\n"
        f"{len(data.files)} of {len(data.numbers)} files, {sum(x.observation.nbytes for x in data.files) / 1e9:.2f} GB"
    )
    # No environment step comes between two gradient steps, so an accelerator does up to 100 in one call. On a CPU
    # XLA runs the body of a loop on one thread, six times slower than without a loop.
    periods = args.checkpoint_period, args.target_period, args.epoch_steps
    n_updates = math.gcd(100, *periods, args.total_timesteps, saved.get("step", 0))
    n_updates = 1 if jax.default_backend() == "cpu" else n_updates
    with contextlib.closing(Run(args, header, saved)) as run:
        if saved:
            state = jax.tree.unflatten(jax.tree.structure(state), jax.device_put(saved.pop("state")))
            rng.bit_generator.state = saved["rng"]
        else:
            run.log({"sparsity/target": 0.0})
        for step in run.steps(n_updates):  # l. 2
            batches = [data.sample(args.batch_size) for _ in range(n_updates)]  # l. 7
            batches = jax.tree.map(lambda *x: np.stack(x), *batches)
            state, metrics = learn_many(args, network, state, batches)  # l. 8-11
            if not np.isfinite(state.cumulated_losses).any():
                fail(f"all networks have diverged at step {step}; try a lower --learning-rate")
            run.clock = run.clock or (step, time.monotonic())  # SPS counts from the first update, which compiles

            if step % args.target_period == 0:  # l. 12
                state = update_target(state)  # l. 13
                run.log({"sparsity/target": state.sparsities[state.target_idx], "sparsity/network": state.sparsities})
                run.log({"losses/cumulated": state.cumulated_losses})
                parents = select_population(rng, state.cumulated_losses, args.tournament_size)  # l. 14
                state = prune_copies(args, rng, state, parents, step)  # l. 15
                state = state._replace(cumulated_losses=jnp.zeros(args.n_networks))  # l. 16

            if step % args.epoch_steps == 0:
                run.returns = evaluate(args, rng, network, state.target_params).tolist()
                run.log({"eval/episodic_return": np.mean(run.returns)})
                if step < args.total_timesteps:
                    data.next_files()
            if step % LOG_PERIOD == 0:
                run.log({"charts/SPS": run.sps(), **metrics})
            if run.saves():
                data_state = {"numbers": data.numbers, "chosen": (data.in_memory, data.chosen)}
                run.save({"target": state.target_params}, rng, state, data=data_state)
    data.reader.shutdown(cancel_futures=True)
    run.summarize(state.target_params)
    if run.stops:
        sys.exit(128 + run.stop_signal)
    return run.folder


def main(args: Args) -> None:
    try:
        play_policy(args) if args.evaluate else train(args)
    except OSError as error:  # a file that is not there, a disk that is full
        fail(str(error))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
