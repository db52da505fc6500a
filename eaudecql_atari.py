# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py>=0.12", "filelock>=3.16", "flax>=0.12", "gymnasium>=1.2", "jax>=0.10", "numpy>=2",
#     "optax>=0.2.5", "tensorboard>=2.20", "tyro>=1.0"]
# ///
"""EauDeCQL on Atari, offline: Q-networks of growing sparsity learn from logged play; the best is the next target.

Algorithm 1 of Vincent et al., "Eau De Q-Network: Adaptive Distillation of Neural Networks in Deep Reinforcement
Learning", 2025, with the loss of Conservative Q-Learning (Kumar et al., 2020). Here a step is a gradient step.

    python eaudecql_atari.py --env-id Pong --dataset-dir data/Pong
"""

import contextlib
import dataclasses
import datetime
import difflib
import functools
import gzip
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import ale_py
import filelock
import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tensorboard.summary import Writer

FRAME, STACK = (84, 84), 4  # pixels of a frame, frames of an observation
LOG_PERIOD = 1_000  # steps between two points of the curves that have a value at every step
SHOWN = {"return": "charts/episodic_return", "evaluation": "eval/episodic_return", "sparsity": "sparsity/target"}
Distribution = Literal["uniform", "erk", "global"]  # of the sparsity over the tensors of a network


# ---- Arguments: the defaults are the paper's, where it has them ------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "Pong"  # what to play: Pong or ALE/Pong-v5 on Atari, Ant or Ant-v5 on MuJoCo
    seed: int = 1  # seed of everything that is random
    total_timesteps: int = 3_125_000  # steps of the run: in the environment online, of the gradient offline [t_final]
    runs_dir: Path = Path("runs")  # folder in which the run gets a folder of its own
    checkpoint_period: int = 250_000  # steps between two checkpoints, from which the run can go on; 0 writes none
    resume: Path | None = None  # folder of a run to go on with, under its own flags
    horizon: int = 27_000  # steps after which an episode is cut [H]
    features: tuple[int, int, int, int] = (32, 64, 64, 512)  # channels of the 3 convolutions, width of the hidden layer
    n_networks: int = 5  # online networks that learn side by side [K]
    tournament_size: int = 3  # networks drawn for a tournament, which the lowest cumulated loss wins [M]
    max_noise: float = 3.0  # a pruning's size is scaled by a random number from 0 to this; 0 never prunes [U_max]
    max_speed: float = 0.01  # largest share of the remaining weights that one pruning removes [S_max]
    sparsity_distribution: Distribution = "uniform"  # same in all tensors, Erdos-Renyi-Kernel, or one threshold for all
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


SMALLEST = {"seed": 0, "checkpoint_period": 0, "horizon": 2, "buffer_size": 2}  # all other whole numbers: 1
LARGEST = {"seed": 2**31 - 1, "horizon": 2**29 - 1, "max_noise": 1e9, "cql_alpha": 1e9}  # all other fractions: 1
NOT_SMALLER = {"n_networks": "tournament_size", "total_timesteps": "epoch_steps"}


def fail(message: str) -> NoReturn:
    """A mistake of the person at the keyboard: one message, exit code 2, no traceback."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_args(args: Args) -> None:
    for name, value in vars(args).items():
        is_fraction = isinstance(getattr(Args, name), float)  # by its default
        smallest = SMALLEST.get(name, 0 if is_fraction else 1)
        largest = LARGEST.get(name, 1 if is_fraction else math.inf)
        if isinstance(value, int | float | tuple) and not all(smallest <= x <= largest for x in np.ravel(value)):
            fail(f"--{name.replace('_', '-')} must be from {smallest} to {largest}, not {value}")
    for name, other in NOT_SMALLER.items():
        if getattr(args, name) < getattr(args, other):
            fail(f"--{name.replace('_', '-')} must not be smaller than --{other.replace('_', '-')}")


def load_args(args: Args) -> Args:
    """With --resume, the flags of that run."""
    if args != Args(resume=args.resume):
        fail("--resume goes on with the run's own flags: leave out all others")
    flags = json.loads((args.resume / "args.json").read_text())
    if flags.keys() != vars(args).keys():
        fail(f"{args.resume} is a run of another script")
    if (args.resume / "policy.npz").exists() and not (args.resume / "checkpoint.npz").exists():
        print(f"{args.resume} is finished, or was stopped without a checkpoint to go on from")
        sys.exit()
    flags = {name: tuple(x) if isinstance(x, list) else x for name, x in flags.items()}
    flags |= {name: Path(x) for name, x in flags.items() if name.endswith("_dir")}
    return Args(**flags | {"resume": args.resume})


# ---- Environment -----------------------------------------------------------------------------------------------------
def canonical_name(env_id: str) -> str:
    """One spelling for all: `MsPacman` for `ALE/MsPacman-v5`, `mspacman` and `ms_pacman`."""
    known = {spec.name.lower(): spec.name for spec in gymnasium.registry.values() if spec.namespace == "ALE"}
    wanted = re.sub(r"^ale/|(noframeskip)?-v\d+$|_", "", env_id.lower())
    if wanted not in known:
        closest = [known[name] for name in difflib.get_close_matches(wanted, known, n=3, cutoff=0)]
        fail(f"unknown Atari game {env_id!r}; the closest names are {', '.join(closest)}")
    return known[wanted]


def make_env(env_id: str, n_envs: int, horizon: int) -> ale_py.AtariVectorEnv:
    """The protocol of Machado et al. (2018), as in the paper's appendix. Several defaults of ale-py differ."""
    return ale_py.AtariVectorEnv(
        gymnasium.spec(f"ALE/{canonical_name(env_id)}-v5").kwargs["game"],
        num_envs=n_envs,
        max_num_frames_per_episode=4 * horizon,
        repeat_action_probability=0.25,  # sticky actions
        full_action_space=False,
        autoreset_mode="SameStep",  # the step that ends an episode returns the first observation of the next one
        img_height=FRAME[0],
        img_width=FRAME[1],
        grayscale=True,
        stack_num=STACK,  # zeros before the first frame of an episode
        frameskip=4,
        maxpool=True,  # over the last two frames
        noop_max=0,
        episodic_life=False,  # game over, not the loss of a life, ends an episode
        reward_clipping=False,  # rewards are clipped for learning only; returns are the game's score
        use_fire_reset=False,
    )


# ---- Replay data -----------------------------------------------------------------------------------------------------
class Batch(NamedTuple):
    frames: np.ndarray  # (batch, STACK + 1, 84, 84) uint8: [:, :-1] is the observation, [:, 1:] the next one
    actions: np.ndarray  # (batch,) int32
    rewards: np.ndarray  # (batch,) float32
    terminals: np.ndarray  # (batch,) bool


REPLAY_FILE = "$store$_{}_ckpt.{}.gz"  # of a member, with a number
REPLAY_MEMBERS = {"observation": np.uint8, "action": np.int32, "reward": np.float32, "terminal": np.uint8}
NO_DATASET = """--dataset-dir is missing, a folder of $store$_*_ckpt.N.gz files: from gs://atari-replay-datasets
(see the README), or your own: python play_policy.py runs/.../policy.npz --record-dir data/Pong"""


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
    except Exception as error:  # a damaged file raises one of a dozen kinds
        raise OSError(f"{path} cannot be used: {error}") from error


def valid_rows(terminals: np.ndarray) -> np.ndarray:
    """The stack and the frame that follows are in the file, and no episode ends in the stack before its last frame."""
    rows = np.arange(STACK - 1, len(terminals) - 1)
    for back in range(1, STACK):  # three rows of zeros come before each episode, so its first stacks are like any other
        rows = rows[terminals[rows - back] == 0]
    return rows


def load_file(args: Args, number: int, n_actions: int) -> list[np.ndarray]:
    paths = [args.dataset_dir / REPLAY_FILE.format(name, number) for name in REPLAY_MEMBERS]
    columns = [read_rows(path, dtype, args.kept_rows) for path, dtype in zip(paths, REPLAY_MEMBERS.values())]
    _, actions, rewards, _ = columns
    np.clip(rewards, -1, 1, out=rewards)
    if len({len(column) for column in columns}) > 1:
        raise OSError(f"{paths[0]} and its companions have {[len(column) for column in columns]} rows")
    if not np.isin(actions, np.arange(n_actions)).all():
        raise OSError(f"{paths[1]} has actions from {actions.min()} to {actions.max()}, the game only {n_actions}")
    return columns


class ReplayData:
    """Some files of the DQN Replay data set (Agarwal et al., 2020); a thread reads the next ones meanwhile."""

    def __init__(self, args: Args, rng: np.random.Generator, n_actions: int, saved: list | None = None):
        """`saved` is (numbers, drawn) of a checkpoint: with it, the same files are read again."""
        self.args, self.rng, self.n_actions, folder = args, rng, n_actions, args.dataset_dir
        self.reader, self.reading, self.drawn = ThreadPoolExecutor(max_workers=1), [], [[], []]
        numbers = sorted({int(path.name.split(".")[-2]) for path in folder.glob(REPLAY_FILE.format("*", "[0-9]*"))})
        for path in [folder / REPLAY_FILE.format(name, k) for name in REPLAY_MEMBERS for k in numbers]:
            path.stat()  # a missing one is known at the start
        paths = {k: folder / REPLAY_FILE.format("terminal", k) for k in numbers}
        self.valid = {k: valid_rows(read_rows(path, np.uint8, args.kept_rows)) for k, path in paths.items()}
        self.numbers = [k for k in numbers if len(self.valid[k])]
        if not self.numbers:
            fail(f"there is no $store$_*_ckpt.N.gz file with a whole transition in {folder}")
        if saved and self.numbers != saved[0]:
            fail(f"{folder} has other files than when the run was started")
        for drawn in saved[1] if saved else (None, None):  # the files in memory, the next ones
            self.next_files(drawn)

    def next_files(self, numbers: list[int] | None = None) -> None:
        """Take what was read, and read the next files: not the same ones, if there are enough."""
        self.files = [future.result() for future in self.reading]
        n_files, others = min(self.args.files_in_memory, len(self.numbers)), np.setdiff1d(self.numbers, self.drawn[1])
        choices = others if len(others) >= n_files else self.numbers
        self.drawn = [self.drawn[1], numbers or self.rng.choice(choices, n_files, replace=False).tolist()]
        self.reading = [self.reader.submit(load_file, self.args, k, self.n_actions) for k in self.drawn[1]]

    def sample(self, batch_size: int) -> Batch:
        valid = [self.valid[k] for k in self.drawn[0]]
        sizes = np.array([len(rows) for rows in valid])
        i = self.rng.choice(len(sizes), p=sizes / sizes.sum())
        rows, (frames, actions, rewards, terminals) = self.rng.choice(valid[i], batch_size), self.files[i]
        frames = frames[rows[:, None] + np.arange(1 - STACK, 2)]  # (batch, STACK + 1, 84, 84)
        return Batch(frames, actions[rows], rewards[rows], terminals[rows] == 1)


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

    # Two parts, as a population is fastest on a CPU if the torsos are a loop and the heads one batched product.
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
def tensor_densities(tensors: list[np.ndarray], sparsity: float, distribution: str) -> np.ndarray:
    """Share of its weights that each tensor keeps."""
    if distribution == "uniform":
        return np.full(len(tensors), 1.0 - sparsity)
    sizes = np.array([x.size for x in tensors])
    if distribution == "global":  # its share of the largest weights of the whole network
        mask = magnitude_mask(np.concatenate([x.ravel() for x in tensors]), 1.0 - sparsity)
        return np.array([part.mean() for part in np.split(mask, sizes.cumsum()[:-1])])
    # Erdos-Renyi-Kernel: density in proportion to sum(shape) / prod(shape), at most 1, and `sparsity` in total.
    sums, dense = np.array([sum(x.shape) for x in tensors]), np.zeros(len(tensors), bool)
    for _ in tensors:
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
    leaves, structure = jax.tree.flatten(jax.device_get(params))
    masks, prunable = [np.ones(x.shape, bool) for x in leaves], [i for i, x in enumerate(leaves) if x.ndim > 1]
    densities = tensor_densities([leaves[i] for i in prunable], sparsity, distribution)
    for i, density in zip(prunable, densities):
        masks[i] = magnitude_mask(leaves[i], density)
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
    """Fig. 3, left: the network that each slot gets, `parents`. An example with losses (5, 1, 4, 2, 3): network 1 is
    the best, and the tournaments are won by 3, 1, 3 and 4. So 1, 3 and 4 stay where they are, the second seats of 1
    and 3 go to the slots of 0 and 2, which were not selected, and `parents` is (1, 1, 3, 3, 4)."""
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


def make_optimizer(args: Args) -> optax.GradientTransformation:
    return optax.adam(args.learning_rate, eps=args.adam_epsilon)


def network_at(stacked, idx):
    """What is at `idx` in all tensors of a tree: one network of a population, or one of each critic's."""
    return jax.tree.map(lambda x: x[idx], stacked)


def put_network(stacked, idx, network) -> None:
    """Writes a network to `idx` in all tensors of a tree, which are of numpy."""
    for tensor, value in zip(jax.tree.leaves(stacked), jax.tree.leaves(network)):
        tensor[idx] = value


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
    )


# ---- Learning --------------------------------------------------------------------------------------------------------
def population_q_values(network: QNetwork, params, observations: jax.Array) -> jax.Array:
    """(K, batch, n_actions). On a CPU, where a vmapped convolution takes twice the time, the torsos are a loop."""
    if jax.default_backend() != "cpu":
        return jax.vmap(network.apply, in_axes=(0, None))(params, observations)
    n_networks = len(jax.tree.leaves(params)[0])
    torsos = [network.apply(network_at(params, k), observations, method="torso") for k in range(n_networks)]
    return jax.vmap(functools.partial(network.apply, method="head"))(params, jnp.stack(torsos))


def learn(args: Args, network: QNetwork, state: AgentState, batch: Batch) -> tuple[AgentState, dict]:
    """Alg. 1, l. 8-11: one gradient step of every network towards the shared target."""
    next_values = network.apply(state.target_params, batch.frames[:, 1:]).max(axis=1)  # (batch,)
    targets = batch.rewards + args.gamma * (1 - batch.terminals) * next_values  # l. 8

    def loss(params):
        all_q_values = population_q_values(network, params, batch.frames[:, :-1])  # (K, batch, n_actions)
        q_values = all_q_values[:, jnp.arange(len(targets)), batch.actions]  # (K, batch)
        conservative = jax.nn.logsumexp(all_q_values, axis=-1) - q_values  # (K, batch)
        # DIFFERS: the mean over the batch; the paper's algorithms write the sum.
        losses = jnp.mean((targets - q_values) ** 2 + args.cql_alpha * conservative, axis=1)  # (K,)
        return losses.sum(), (losses, q_values.mean(axis=1))  # the gradient of the sum is that of each one's own loss

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


def prune_copies(args: Args, rng: np.random.Generator, state: AgentState, parents: np.ndarray, step: int) -> AgentState:
    """Alg. 1, l. 15: the duplicated networks are pruned to a sparsity drawn by Eq. (3), all others stay as they are."""
    state, next_step = jax.tree.map(np.array, state), step + args.target_period  # of numpy, to write to
    for k in np.flatnonzero(parents != np.arange(args.n_networks)):
        noise, parent_sparsity = rng.uniform(0, args.max_noise), float(state.sparsities[parents[k]])
        sparsity = next_sparsity(parent_sparsity, noise, step, next_step, args.total_timesteps, args.max_speed)
        params = network_at(state.params, parents[k])
        masks = magnitude_masks(params, sparsity, args.sparsity_distribution)
        params = jax.tree.map(np.multiply, params, masks)
        put_network(state.params, k, params)
        put_network(state.opt_state, k, make_optimizer(args).init(params))  # copies start a new Adam
        put_network(state.masks, k, masks)
        state.sparsities[k] = sparsity
    return jax.device_put(state)


# ---- Acting ----------------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnums=0)
def greedy_actions(network: QNetwork, params, observations: np.ndarray) -> jax.Array:
    return network.apply(params, observations).argmax(axis=1)


def evaluate(args: Args, rng: np.random.Generator, network: QNetwork, params) -> np.ndarray:
    """Returns of whole episodes, one in each environment, in the game's score."""
    env = make_env(args.env_id, args.eval_episodes, args.horizon)
    observations, _ = env.reset(seed=int(rng.integers(2**30)))
    returns, playing = np.zeros(args.eval_episodes), np.ones(args.eval_episodes, bool)
    while playing.any():
        actions = np.array(greedy_actions(network, params, observations))
        explore = rng.random(args.eval_episodes) < args.eval_epsilon
        actions[explore] = rng.integers(network.n_actions, size=explore.sum())
        observations, rewards, terminals, truncations, _ = env.step(actions)
        returns += rewards * playing
        playing &= ~(terminals | truncations)
    return returns


# ---- Training --------------------------------------------------------------------------------------------------------
def train(args: Args) -> Path:
    args = load_args(args) if args.resume else args
    check_args(args)
    folder = args.dataset_dir or fail(NO_DATASET)
    args = dataclasses.replace(args, env_id=canonical_name(args.env_id), dataset_dir=folder.resolve())
    rng, env = np.random.default_rng(args.seed), make_env(args.env_id, n_envs=1, horizon=args.horizon)
    network = QNetwork(args.features, int(env.single_action_space.n))
    state = init_agent(args, network, jax.random.key(args.seed))  # Alg. 1, l. 1
    with contextlib.closing(Run(args)) as run:
        state, saved = run.restore(rng, state) if args.resume else (state, None)
        state, data = jax.device_put(state), ReplayData(args, rng, network.n_actions, saved)
        # No environment step comes between two gradient steps, so an accelerator does up to 100 in one call. On a CPU
        # XLA runs the body of a loop on one thread, six times slower than without a loop.
        periods = args.checkpoint_period, args.target_period, args.epoch_steps
        n_updates = 1 if jax.default_backend() == "cpu" else math.gcd(100, *periods, args.total_timesteps, run.step)
        for step in run.steps(stride=n_updates):  # l. 2
            batches = [data.sample(args.batch_size) for _ in range(n_updates)]  # l. 7
            batches = jax.tree.map(lambda *x: np.stack(x), *batches)
            state, metrics = learn_many(args, network, state, batches)  # l. 8-11
            if not np.isfinite(state.cumulated_losses).any():
                fail(f"all networks have diverged at step {step}; try a lower --learning-rate")

            if step % args.target_period == 0:  # l. 12
                target_idx = state.cumulated_losses.argmin()  # l. 13
                state = state._replace(target_params=network_at(state.params, target_idx))
                run.log({"sparsity/target": state.sparsities[target_idx], "sparsity/network": state.sparsities})
                parents = select_population(rng, state.cumulated_losses, args.tournament_size)  # l. 14
                run.log({"losses/cumulated": state.cumulated_losses, "population/parent": parents})
                state = prune_copies(args, rng, state, parents, step)  # l. 15
                state = state._replace(cumulated_losses=jnp.zeros(args.n_networks))  # l. 16

            if step % args.epoch_steps == 0:
                run.log({"eval/episodic_return": evaluate(args, rng, network, state.target_params).mean()})
                data.next_files()
            if step % LOG_PERIOD == 0:
                run.log(metrics)
            if run.save_is_due():
                run.save({"target": state.target_params}, rng, state, (data.numbers, data.drawn))
        data.reader.shutdown(cancel_futures=True)
    return run.folder


# ---- Run: folder, curves, screen, checkpoint, policy file ------------------------------------------------------------
def write_npz(path: Path, about: dict, tree, save=np.savez) -> None:
    """The tree's arrays by name, and `about` as JSON: there as a whole or not at all, even if the power fails."""
    leaves, temporary = jax.tree.leaves_with_path(jax.device_get(tree)), Path(f"{path}.tmp")
    arrays = {jax.tree_util.keystr(name, simple=True, separator="/"): x for name, x in leaves}
    with open(temporary, "wb") as file:
        save(file, about=json.dumps(about | {"arrays": list(arrays)}, default=float), **arrays)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_npz(path: Path) -> tuple[dict, dict]:
    with open(path, "rb") as file, contextlib.suppress(Exception), np.load(file) as arrays:  # damage has many kinds
        if arrays.zip.testzip() is None:  # all checksums are right; np.load does not look at all bytes
            about = json.loads(str(arrays["about"]))
            return about, {name: arrays[name] for name in about["arrays"]}  # damage can hide an array of a zip file
    fail(f"{path} is damaged")


class Run:
    """A run as a person sees it: its folder, its curves, its progress. Ctrl-C and SIGTERM end it after a step."""

    def __init__(self, args: Args):
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time():.3f}"
        self.args, self.folder, self.step = args, args.resume or args.runs_dir / name, 0
        self.stop_signal, self.stopped, self.latest, self.sps, self.shown = None, False, {}, 0.0, time.perf_counter()
        self.lock = filelock.FileLock(self.folder / "in_use.lock").acquire(blocking=False).lock  # makes the folder, too
        if not args.resume:
            (self.folder / "args.json").write_text(json.dumps(vars(args), indent=2, default=str))

    def restore(self, rng: np.random.Generator, tree) -> tuple:
        """What `save` was given: a tree of the same structure, and the notes. The curves are cut back to that step."""
        about, arrays = read_npz(self.folder / "checkpoint.npz")
        newer = {path.name: 0 for path in self.folder.glob("events*")}
        for name, size in (newer | about["files"]).items():
            os.truncate(self.folder / name, size)  # an error if it is missing
        self.step, rng.bit_generator.state = about["step"], about["rng"]
        return jax.tree.unflatten(jax.tree.structure(tree), arrays.values()), about["notes"]

    def interrupt(self, signum: int, _) -> None:
        self.stop_signal = signum  # the run ends after its current step
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C ends it at once

    def steps(self, learning_starts: int = 0, stride: int = 1):
        for signum in (signal.SIGINT, signal.SIGTERM):
            signal.signal(signum, self.interrupt)
        print(f"Run folder {self.folder}, on the {jax.default_backend().upper()}, after {self.step:,} steps")
        with contextlib.closing(Writer(str(self.folder))) as self.writer:
            timed_from = max(self.step, learning_starts) + 100  # by then updates run, and have compiled
            while self.step < self.args.total_timesteps and not self.stopped:
                self.step += stride
                yield self.step
                if self.step <= timed_from:
                    start = time.perf_counter()
                else:
                    self.sps = (self.step - timed_from) / (time.perf_counter() - start)
                    if self.step % LOG_PERIOD == 0:
                        self.log({"charts/SPS": self.sps})
                if time.perf_counter() - self.shown > (0.5 if sys.stdout.isatty() else 30):  # seconds
                    self.show()
        self.show()
        end, n_kept = "Interrupted" if self.stopped else "Finished", np.count_nonzero(self.weights)
        print(f"\n{end} after {self.step:,} steps, with {n_kept:,} of {self.weights.size:,} weights", flush=True)
        if self.stopped and self.args.checkpoint_period:
            print(f"python {sys.argv[0]} --resume {self.folder}")
        print(f"python play_policy.py {self.folder}/policy.npz\ntensorboard --logdir {self.folder.parent}")
        if not self.stopped:
            for name in ("checkpoint.npz", "replay", "in_use.lock"):
                (self.folder / name).unlink(missing_ok=True)

    def log(self, scalars: dict) -> None:
        """A number gives one curve, a vector gives `tag_0`, `tag_1`, ..."""
        for tag, value in scalars.items():
            self.latest[tag] = np.mean(value)
            for k, x in enumerate(np.ravel(value)):
                self.writer.add_scalar(f"{tag}_{k}" if np.ndim(value) else tag, x, self.step)

    def show(self) -> None:
        self.shown, total = time.perf_counter(), self.args.total_timesteps
        status = f"[{'#' * (20 * self.step // total):20}] {self.step:,}/{total:,} steps"
        if self.sps:
            status += f", {self.sps:,.1f} SPS, {datetime.timedelta(seconds=(total - self.step) // self.sps)} left"
        status += "".join(f", {name} {self.latest[tag]:.4g}" for name, tag in SHOWN.items() if tag in self.latest)
        width = shutil.get_terminal_size().columns - 1
        print(f"\r{status[:width]:{width}}" if sys.stdout.isatty() else f"{status}\n", end="", flush=True)

    def save_is_due(self) -> bool:
        total, period = self.args.total_timesteps, self.args.checkpoint_period or math.inf
        return self.step % period == 0 or self.step == total or self.stop_signal is not None

    def save(self, policy: dict, rng: np.random.Generator, tree, notes) -> None:
        """The networks that play, and what it takes to go on as if the run had never stopped."""
        policy = jax.tree.map(lambda x: np.asarray(x) + 0, policy)  # -0 becomes 0: then the file is smaller
        self.weights = np.concatenate([x.ravel() for x in jax.tree.leaves(policy) if x.ndim > 1])
        if not all(np.isfinite(x).all() for x in jax.tree.leaves(policy)):
            fail(f"the networks have diverged by step {self.step}; try a lower --learning-rate")
        if self.args.checkpoint_period and self.step < self.args.total_timesteps:
            self.writer.flush()
            files = {}
            for path in (*self.folder.glob("events*"), *self.folder.glob("replay")):
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
                files[path.name] = path.stat().st_size
            about = {"step": self.step, "rng": rng.bit_generator.state, "files": files, "notes": notes}
            write_npz(self.folder / "checkpoint.npz", about, tree)
        flags = json.loads((self.folder / "args.json").read_text())
        about = {"script": Path(__file__).stem, "args": flags, "step": self.step}
        write_npz(self.folder / "policy.npz", about, policy, np.savez_compressed)
        self.stopped = self.stop_signal is not None and self.step < self.args.total_timesteps

    def close(self) -> None:
        self.lock.release()
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self.step == 0 and not self.args.resume:  # the run could not start
            shutil.rmtree(self.folder)
        if self.stopped:
            sys.exit(128 + self.stop_signal)


def main(args: Args) -> None:
    try:
        train(args)
    except (OSError, MemoryError, json.JSONDecodeError) as error:  # a missing file, a full disk, a run in use
        fail(str(error))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
