# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py>=0.12", "filelock>=3.16", "flax>=0.12", "gymnasium>=1.2", "jax>=0.10", "numpy>=2",
#     "optax>=0.2.5", "tensorboard>=2.20", "tqdm>=4.66", "tyro>=1.0"]
# ///
"""EauDeCQL on Atari, offline: Q-networks of growing sparsity learn from logged play; the best is the next target.

Algorithm 1 of Vincent et al., "Eau De Q-Network: Adaptive Distillation of Neural Networks in Deep Reinforcement
Learning", 2025, with the loss of Conservative Q-Learning (Kumar et al., 2020). Here a step is a gradient step.

    python eaudecql_atari.py --env-id Pong --dataset-dir data/Pong
"""

import contextlib
import dataclasses
import difflib
import functools
import gzip
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn, get_type_hints

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends it without a traceback

import ale_py
import filelock
import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tqdm import tqdm

FRAME, STACK = (84, 84), 4  # pixels of a frame, frames of an observation
LOG_PERIOD = 1_000  # steps between two points of the curves that have a value at every step
Distribution = Literal["erk", "uniform", "global"]  # of the sparsity over the tensors of a network


# ---- Arguments: the defaults are the paper's, where it has them ------------------------------------------------------
Whole = Annotated[int, (1, math.inf)]  # a type and its range; a bound can name another flag: (1, "total_timesteps")
Share = Annotated[float, (0, 1)]


@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "Pong"  # the game: MsPacman, ms_pacman or ALE/MsPacman-v5
    seed: Annotated[int, (0, 2**31 - 1)] = 1  # seed of everything that is random
    total_timesteps: Whole = 3_125_000  # gradient steps of the run [t_final]
    runs_dir: Path = Path("runs")  # folder in which the run gets a folder of its own
    checkpoint_period: Annotated[int, (0, math.inf)] = 250_000  # steps between two checkpoints; 0 writes none
    resume: Path | None = None  # folder of a run to go on with, under its own flags
    horizon: Annotated[int, (2, 2**29 - 1)] = 27_000  # steps after which an episode is cut [H]
    features: Annotated[tuple[int, int, int, int], (1, math.inf)] = (32, 64, 64, 512)  # 3 convolutions, hidden layer
    n_networks: Whole = 5  # online networks that learn side by side [K]
    tournament_size: Annotated[int, (1, "n_networks")] = 3  # networks drawn for a tournament; the lowest loss wins [M]
    max_noise: Annotated[float, (0, 1e9)] = 3.0  # a pruning's size is scaled by a draw from 0 to this [U_max]
    max_speed: Share = 0.01  # largest share of the remaining weights that one pruning removes [S_max]
    sparsity_distribution: Distribution = "erk"  # erk: more of large tensors; uniform: all alike; global: one threshold
    target_period: Whole = 2_000  # steps between two target updates [T]
    batch_size: Whole = 32  # transitions in a gradient step [B]
    gamma: Share = 0.99  # discount factor [gamma]
    learning_rate: Share = 5e-5  # step size of Adam
    adam_epsilon: Share = 3.125e-4  # epsilon of Adam
    cql_alpha: Annotated[float, (0, 1e9)] = 0.1  # weight of the conservative term; 0 is plain offline DQN
    dataset_dir: Path | None = None  # folder of the $store$_*_ckpt.N.gz files of one game
    kept_rows: Whole = 50_000  # rows read from the start of each file
    files_in_memory: Whole = 5  # files (353 MB each) that batches come from; as many are read ahead for the next epoch
    epoch_steps: Annotated[int, (1, "total_timesteps")] = 62_500  # gradient steps between two evaluations
    eval_episodes: Whole = 10  # episodes of an evaluation, played side by side
    eval_epsilon: Share = 0.01  # share of random actions in an evaluation


def fail(message: str) -> NoReturn:
    """A mistake of the person at the keyboard: one message, exit code 2, no traceback."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_args(args: Args) -> None:
    """Each flag is within its range, which stands beside it."""
    for name, kind in get_type_hints(Args, include_extras=True).items():
        for bounds in getattr(kind, "__metadata__", ()):  # (smallest, largest), if there is a range
            smallest, largest = [getattr(args, x) if isinstance(x, str) else x for x in bounds]
            if not all(smallest <= x <= largest for x in np.ravel(getattr(args, name))):
                others = "".join(f", the value of --{x}" for x in bounds if isinstance(x, str)).replace("_", "-")
                flag = f"--{name.replace('_', '-')}"
                fail(f"{flag} must be from {smallest} to {largest}{others}, not {getattr(args, name)}")


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
    frames: np.ndarray  # (batch, STACK + 1, 84, 84) uint8, of the observation and the next one
    actions: np.ndarray  # (batch,) int32
    rewards: np.ndarray  # (batch,) float32
    terminals: np.ndarray  # (batch,) bool

    @property
    def observations(self) -> np.ndarray:
        return self.frames[:, :-1]

    @property
    def next_observations(self) -> np.ndarray:
        return self.frames[:, 1:]


REPLAY_FILE = "$store$_{}_ckpt.{}.gz"  # of a member, with a number
REPLAY_MEMBERS = {"observation": np.uint8, "action": np.int32, "reward": np.float32, "terminal": np.uint8}
NO_DATASET = """--dataset-dir is missing, a folder of $store$_*_ckpt.N.gz files: from gs://atari-replay-datasets
(see the README), or your own, which play_policy.py writes with --record-dir data/Pong"""


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

    EMPTY = {"numbers": np.zeros(0, int), "current": np.zeros(0, int), "upcoming": np.zeros(0, int)}  # in a new run

    def __init__(self, args: Args, rng: np.random.Generator, n_actions: int, numbers=(), current=(), upcoming=()):
        """With the numbers of a checkpoint, the same files are read again."""
        self.args, self.rng, self.n_actions = args, rng, n_actions
        self.valid = self.find_files()
        self.numbers = [number for number, rows in self.valid.items() if len(rows)]
        if not self.numbers:
            fail(f"there is no $store$_*_ckpt.N.gz file with a whole transition in {args.dataset_dir}")
        if len(numbers) and self.numbers != list(numbers):
            fail(f"{args.dataset_dir} has other files than when the run was started")
        self.reader, self.error = ThreadPoolExecutor(max_workers=1), None
        self.current = list(current) or self.draw([])
        self.upcoming = list(upcoming) or self.draw(self.current)
        self.files = [load_file(args, number, n_actions) for number in self.current]
        self.reading = [self.reader.submit(load_file, args, number, n_actions) for number in self.upcoming]

    def find_files(self) -> dict[int, np.ndarray]:
        """The rows that can be sampled, by the number of a file."""
        folder = self.args.dataset_dir
        names = [path.name.split(".") for path in folder.glob(REPLAY_FILE.format("*", "*"))]
        numbers = sorted({int(name[1]) for name in names if name[1].isdigit()})  # not "0 (1)", a browser's second copy
        for path in [folder / REPLAY_FILE.format(member, k) for member in REPLAY_MEMBERS for k in numbers]:
            path.stat()  # a missing one is known at the start
        paths = {k: folder / REPLAY_FILE.format("terminal", k) for k in numbers}
        return {k: valid_rows(read_rows(path, np.uint8, self.args.kept_rows)) for k, path in paths.items()}

    def draw(self, before: list[int]) -> list[int]:
        """Numbers of files: not those before, if there are enough."""
        n_files = min(self.args.files_in_memory, len(self.numbers))
        others = [number for number in self.numbers if number not in before]
        return self.rng.choice(others if len(others) >= n_files else self.numbers, n_files, replace=False).tolist()

    def next_files(self) -> None:
        """Take the files that were read meanwhile, and start to read others."""
        self.current, self.upcoming = self.upcoming, self.draw(self.upcoming)
        try:
            self.files = [future.result() for future in self.reading]
        except OSError as error:  # the folder is gone: the run writes a checkpoint, and ends
            self.error = error
        self.reading = [self.reader.submit(load_file, self.args, k, self.n_actions) for k in self.upcoming]

    def sample(self, batch_size: int) -> Batch:
        valid = [self.valid[number] for number in self.current]
        sizes = np.array([len(rows) for rows in valid])
        i = self.rng.choice(len(sizes), p=sizes / sizes.sum())
        rows = self.rng.choice(valid[i], batch_size)
        frames, actions, rewards, terminals = self.files[i]
        frames = frames[rows[:, None] + np.arange(1 - STACK, 2)]  # (batch, STACK + 1, 84, 84)
        return Batch(frames, actions[rows], rewards[rows], terminals[rows] == 1)

    def saved(self) -> dict:
        return {name: np.array(getattr(self, name)) for name in self.EMPTY}


# ---- Network ---------------------------------------------------------------------------------------------------------
def xavier_uniform(key: jax.Array, shape: tuple[int, ...], dtype: type) -> jax.Array:
    """Drawn flat, since XLA needs up to ten times as long to compile a draw with four axes."""
    fan_in, fan_out = (math.prod(shape[:-2]) * n for n in shape[-2:])
    limit = math.sqrt(6 / (fan_in + fan_out))
    return jax.random.uniform(key, (math.prod(shape),), dtype, -limit, limit).reshape(shape)


class QNetwork(nn.Module):
    features: tuple[int, ...]
    n_actions: int

    layers = {  # said in policy.npz, for those who run the network without JAX
        "Conv_0": {"kind": "convolution", "stride": 4, "padding": "SAME"},
        "Conv_1": {"kind": "convolution", "stride": 2, "padding": "SAME"},
        "Conv_2": {"kind": "convolution", "stride": 1, "padding": "SAME"},
        "Dense_0": {"kind": "dense"},
        "Dense_1": {"kind": "dense"},
    }

    def setup(self):
        n_first, n_second, n_third, n_hidden = self.features
        self.first = nn.Conv(n_first, (8, 8), 4, kernel_init=xavier_uniform, name="Conv_0")
        self.second = nn.Conv(n_second, (4, 4), 2, kernel_init=xavier_uniform, name="Conv_1")
        self.third = nn.Conv(n_third, (3, 3), 1, kernel_init=xavier_uniform, name="Conv_2")
        self.hidden = nn.Dense(n_hidden, kernel_init=xavier_uniform, name="Dense_0")
        self.output = nn.Dense(self.n_actions, kernel_init=xavier_uniform, name="Dense_1")

    # Two parts: a population, in EauDe, is fastest on a CPU if the torsos are a loop and the heads one batched product.
    def torso(self, observations: jax.Array) -> jax.Array:
        x = jnp.moveaxis(observations, 1, -1) / 255.0  # (batch, 84, 84, STACK)
        x = nn.relu(self.first(x))  # (batch, 21, 21, n_first)
        x = nn.relu(self.second(x))  # (batch, 11, 11, n_second)
        x = nn.relu(self.third(x))  # (batch, 11, 11, n_third)
        return x.reshape(len(x), -1)  # (batch, 121 * n_third)

    def head(self, x: jax.Array) -> jax.Array:
        return self.output(nn.relu(self.hidden(x)))  # (batch, n_actions)

    def __call__(self, observations: jax.Array) -> jax.Array:
        return self.head(self.torso(observations))


# ---- Pruning ---------------------------------------------------------------------------------------------------------
def tensor_densities(tensors: list[np.ndarray], sparsity: float, distribution: str) -> np.ndarray:
    """Share of its weights that each tensor keeps."""
    sizes = np.array([x.size for x in tensors])
    if distribution == "uniform":
        return np.full(len(tensors), 1.0 - sparsity)
    if distribution == "global":  # its share of the largest weights of the whole network
        mask = magnitude_mask(np.concatenate([x.ravel() for x in tensors]), 1.0 - sparsity)
        return np.array([part.mean() for part in np.split(mask, sizes.cumsum()[:-1])])
    if distribution != "erk":
        raise ValueError(f"unknown distribution {distribution!r}: choose uniform, erk or global")
    # DIFFERS: by default a small tensor loses less (erk); the paper's sentence reads as one threshold for all weights.
    # Erdos-Renyi-Kernel: density in proportion to sum(shape) / prod(shape), and `sparsity` in total. A tensor whose
    # density would exceed 1 stays dense, and the others share the rest: each round can find one more.
    sums = np.array([sum(x.shape) for x in tensors])
    dense, scale = np.zeros(len(tensors), bool), 0.0
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
    """Masks of one network (not of a stacked population), on the host: True is kept. Biases are never pruned."""
    if not 0 <= sparsity < 1:
        raise ValueError(f"a sparsity is from 0 to less than 1, not {sparsity}")
    leaves, structure = jax.tree.flatten(jax.device_get(params))
    masks = [np.ones(x.shape, bool) for x in leaves]
    prunable = [i for i, x in enumerate(leaves) if x.ndim > 1]
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
    the best, and the tournaments are won by 3, 1, 3 and 4. So 1, 3 and 4 stay in their slots, copies of 1 and 3, which
    were selected a second time, go to slots 0 and 2, which were not, and `parents` is (1, 1, 3, 3, 4)."""
    losses = np.asarray(losses)
    finite = np.flatnonzero(np.isfinite(losses))
    if not len(finite):
        raise ValueError(f"no network has a finite loss: {losses}")
    selected = [finite[losses[finite].argmin()]]  # the lowest loss of all, then the winners of tournaments
    for _ in range(len(losses) - 1):
        drawn = rng.choice(finite, min(tournament_size, len(finite)), replace=False)
        selected.append(drawn[losses[drawn].argmin()])
    parents = np.arange(len(losses))
    free_slots = [k for k in parents if k not in selected]
    for i, k in enumerate(selected):
        if k in selected[:i]:  # its second selection, or a further one
            parents[free_slots.pop(0)] = k
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


@jax.jit
def network_at(stacked, idx):
    """What is at `idx` in all tensors of a tree: one network of a population, or several."""
    return jax.tree.map(lambda x: x[idx], stacked)


@jax.jit(static_argnums=(0, 1))
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
    if jax.default_backend() != "cpu" or not hasattr(network, "torso"):
        return jax.vmap(network.apply, in_axes=(0, None))(params, observations)
    n_networks = len(jax.tree.leaves(params)[0])
    torsos = [network.apply(network_at(params, k), observations, method="torso") for k in range(n_networks)]
    return jax.vmap(functools.partial(network.apply, method="head"))(params, jnp.stack(torsos))


def learn(args: Args, network: QNetwork, state: AgentState, batch: Batch) -> tuple[AgentState, dict]:
    """Alg. 1, l. 8-11: one gradient step of every network towards the shared target."""
    next_values = network.apply(state.target_params, batch.next_observations).max(axis=1)  # (batch,)
    targets = batch.rewards + args.gamma * (1 - batch.terminals) * next_values  # l. 8

    def loss(params):
        all_q_values = population_q_values(network, params, batch.observations)  # (K, batch, n_actions)
        q_values = all_q_values[:, jnp.arange(len(targets)), batch.actions]  # (K, batch)
        conservative = jax.nn.logsumexp(all_q_values, axis=-1) - q_values  # (K, batch)
        # DIFFERS: the mean over the batch; the paper's algorithms write the sum.
        losses = jnp.mean((targets - q_values) ** 2 + args.cql_alpha * conservative, axis=1)  # (K,)
        return losses.sum(), (losses, q_values.mean(axis=1))  # the gradient of the sum is that of each one's own loss

    grads, (losses, mean_q_values) = jax.grad(loss, has_aux=True)(state.params)  # l. 9-10
    updates, opt_state = jax.vmap(make_optimizer(args).update)(grads, state.opt_state)  # l. 11
    params = optax.apply_updates(state.params, updates)
    params = jax.tree.map(jnp.multiply, params, state.masks)  # what was pruned stays pruned

    losses_or_inf = jnp.where(jnp.isfinite(losses), losses, jnp.inf)  # infinite: never drawn, never selected
    cumulated_losses = state.cumulated_losses + losses_or_inf  # l. 11, too
    state = state._replace(params=params, opt_state=opt_state, cumulated_losses=cumulated_losses)
    return state, {"losses/cql_loss": losses.mean(), "losses/q_values": mean_q_values.mean()}


@jax.jit(static_argnums=(0, 1), donate_argnums=2)
def learn_many(args: Args, network: QNetwork, state: AgentState, batches: Batch) -> tuple[AgentState, dict]:
    """Many gradient steps in one call, `batches` being stacked. For a single one there is no loop."""
    if len(batches.actions) == 1:
        return learn(args, network, state, jax.tree.map(lambda x: x[0], batches))
    state, metrics = jax.lax.scan(functools.partial(learn, args, network), state, batches)
    return state, jax.tree.map(lambda x: x[-1], metrics)


def updates_per_call(*steps: int) -> int:
    """Up to 100 gradient steps in one call, a number that divides all of `steps`. On a CPU one, as there XLA runs the
    body of a loop on one thread, six times slower than without a loop."""
    return 1 if jax.default_backend() == "cpu" else math.gcd(100, *steps)


def checked_losses(state: AgentState, step: int) -> np.ndarray:
    """L_k, infinite for a network with a weight that is not finite: its last update can follow on a finite loss."""
    norms = jax.vmap(optax.tree.norm)(state.params)
    losses = np.where(np.isfinite(norms), state.cumulated_losses, np.inf)
    if not np.isfinite(losses).any():
        fail(f"all networks have diverged by step {step}; try a lower --learning-rate")
    return losses


def prune_copies(args: Args, rng: np.random.Generator, state: AgentState, parents: np.ndarray, step: int) -> AgentState:
    """Alg. 1, l. 15: slot k gets network `parents[k]`, and copies are pruned to a sparsity drawn by Eq. (3)."""
    next_step = step + args.target_period
    sparsities = np.array(state.sparsities, float)
    masks_by_slot = [network_at(state.masks, parent) for parent in parents]
    for k in np.flatnonzero(parents != np.arange(args.n_networks)):
        noise = rng.uniform(0, args.max_noise)
        parent_sparsity = sparsities[parents[k]]  # not a new one: parents stay in their slots
        sparsity = next_sparsity(parent_sparsity, noise, step, next_step, args.total_timesteps, args.max_speed)
        sparsities[k] = min(sparsity, 1 - 1e-6)  # `magnitude_masks` wants less than 1
        parent = network_at(state.params, parents[k])
        masks_by_slot[k] = magnitude_masks(parent, sparsities[k], args.sparsity_distribution)
    masks = jax.tree.map(lambda *x: jnp.stack(x), *masks_by_slot)  # (K, ...)
    return next_population(args, state, parents, masks, sparsities)


@jax.jit(static_argnums=0, donate_argnums=1)
def next_population(args: Args, state: AgentState, parents, masks, sparsities) -> AgentState:
    """Networks gathered by `parents`, on the device. Those that stay keep their Adam, copies start a new one."""
    params = jax.tree.map(jnp.multiply, network_at(state.params, parents), masks)
    stays = parents == jnp.arange(args.n_networks)
    fresh = jax.vmap(make_optimizer(args).init)(params)
    opt_state = jax.vmap(optax.tree.where)(stays, network_at(state.opt_state, parents), fresh)
    return state._replace(params=params, opt_state=opt_state, masks=masks, sparsities=sparsities)


@jax.jit
def count_distinct(params) -> jax.Array:
    """Different networks of a population: copies of one parent, pruned to the same sparsity, are equal."""
    tensors = [x.reshape(len(x), -1) for x in jax.tree.leaves(params)]
    equal = jnp.stack([(x[:, None] == x).all(axis=-1) for x in tensors]).all(axis=0)  # (K, K)
    return (~jnp.tril(equal, -1).any(axis=1)).sum()  # those that equal none before them


# ---- Acting ----------------------------------------------------------------------------------------------------------
@jax.jit(static_argnums=0)
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
    if args.dataset_dir is None:
        fail(NO_DATASET)
    args = dataclasses.replace(args, env_id=canonical_name(args.env_id), dataset_dir=args.dataset_dir.resolve())
    rng = np.random.default_rng(args.seed)
    env = make_env(args.env_id, n_envs=1, horizon=args.horizon)
    network = QNetwork(args.features, int(env.single_action_space.n))
    state = init_agent(args, network, jax.random.key(args.seed))  # Alg. 1, l. 1
    with contextlib.closing(Run(args, rng)) as run:
        saved = run.restore(state=state, data=ReplayData.EMPTY)  # in a new run, just these
        state = saved["state"]
        data = ReplayData(args, rng, network.n_actions, **saved["data"])
        periods = args.checkpoint_period, args.target_period, args.epoch_steps
        n_updates = updates_per_call(*periods, args.total_timesteps, run.step)
        for step in run.steps(stride=n_updates):  # l. 2
            drawn = [data.sample(args.batch_size) for _ in range(n_updates)]  # l. 7
            batches = jax.tree.map(lambda *x: np.stack(x), *drawn)  # (n_updates, batch, ...)
            state, metrics = learn_many(args, network, state, batches)  # l. 8-11

            if step % args.target_period == 0:  # l. 12
                losses = checked_losses(state, step)
                target_idx = losses.argmin()  # l. 13
                state = state._replace(target_params=network_at(state.params, target_idx))
                parents = select_population(rng, losses, args.tournament_size)  # l. 14
                run.log({"sparsity/target": state.sparsities[target_idx], "sparsity/network": state.sparsities})
                run.log({"losses/cumulated": losses, "population/parent": parents})
                state = prune_copies(args, rng, state, parents, step)  # l. 15
                state = state._replace(cumulated_losses=jnp.zeros(args.n_networks))  # l. 16
                run.log({"population/distinct": count_distinct(state.params)})

            if step % args.epoch_steps == 0:
                run.log({"eval/episodic_return": evaluate(args, rng, network, state.target_params).mean()})
                if step < args.total_timesteps:
                    data.next_files()
            if step % LOG_PERIOD == 0:
                run.log(metrics)
            if run.save_is_due() or data.error:
                checkpoint = {"state": state, "data": data.saved()}
                layers = {"target": getattr(network, "layers", {})}  # without them `play_policy.py` cannot play it
                run.save({"target": state.target_params}, layers, checkpoint, metrics)
            if data.error:
                raise data.error
        data.reader.shutdown(cancel_futures=True)
        if step < args.target_period:
            print("The policy is an untrained network: there was no target update")
    return run.folder


# ---- Run: folder, curves, progress bar, checkpoint, policy file ------------------------------------------------------
SHOWN = {"charts/episodic_return": "return", "eval/episodic_return": "evaluation", "sparsity/target": "sparsity"}


def arrays_by_name(tree) -> dict:
    """`{"state/params/params/Conv_0/kernel": ..., ...}`"""
    leaves = jax.tree.leaves_with_path(jax.device_get(tree))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}


def layout(arrays: dict) -> dict:
    """Columns and shape of each array, by name. What is not of the state grows: it may have any shape."""
    return {name: (x.dtype.names, name.startswith("state/") and x.shape) for name, x in arrays.items()}


def write_npz(path: Path, about: dict, tree, save=np.savez) -> None:
    """The tree's arrays by name, and `about` as JSON: there as a whole or not at all, even if the power fails."""
    arrays, temporary = arrays_by_name(tree), Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            save(file, about=json.dumps(about | {"arrays": list(arrays)}, default=float), **arrays)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)  # if the disk was full


def read_npz(path: Path) -> tuple[dict, dict]:
    try:
        with open(path, "rb") as file, np.load(file) as arrays:
            if arrays.zip.testzip():  # np.load does not look at all bytes
                raise ValueError("a member has a wrong checksum")
            about = json.loads(str(arrays["about"]))
            return about, {name: arrays[name] for name in about["arrays"]}  # damage can hide an array of a zip file
    except Exception:  # damage has a dozen kinds
        fail(f"{path} is damaged")


def load_args(args: Args) -> Args:
    """With --resume, the flags of that run."""
    folder = args.resume
    if not (folder / "args.json").exists():
        fail(f"{folder} is not the folder of a run")
    try:
        flags = dict(json.loads((folder / "args.json").read_text()))
    except (ValueError, TypeError):
        fail(f"{folder / 'args.json'} is damaged")
    script = flags.pop("script", "another script")
    differing = sorted(flags.keys() ^ vars(args).keys())
    if script != Path(__file__).stem:
        fail(f"{folder} is a run of {script}")
    if differing:
        fail(f"{folder} is a run of another version of this script: it differs in {', '.join(differing)}")
    checkpoint, policy = folder / "checkpoint.npz", folder / "policy.npz"
    if not checkpoint.exists() and policy.exists() and read_npz(policy)[0]["step"] == flags["total_timesteps"]:
        print(f"{folder} is finished")
        sys.exit()
    filelock.FileLock(folder / "in_use.lock").acquire(blocking=False)  # only asks: an error if the run is under way
    if not checkpoint.exists():
        fail(f"{folder} has no checkpoint to go on from")
    flags = {name: tuple(x) if isinstance(x, list) else x for name, x in flags.items()}
    flags |= {name: Path(x) for name, x in flags.items() if name.endswith("_dir")}
    return dataclasses.replace(Args(**flags), resume=folder)


class Run:
    """A run as a person sees it: its folder, its curves, its progress. Ctrl-C and SIGTERM end it after a step."""

    def __init__(self, args: Args, rng: np.random.Generator):
        name = f"{args.env_id}__{Path(__file__).stem}__{args.seed}__{time.time():.3f}"
        self.args, self.rng, self.step = args, rng, 0
        self.folder = args.resume or args.runs_dir / name
        self.shown, self.handlers = {}, {}
        self.stop_signal, self.stopped = None, False
        with contextlib.suppress(ValueError):  # outside the main thread Python allows no handlers
            self.handlers = {x: signal.signal(x, self.interrupt) for x in (signal.SIGINT, signal.SIGTERM)}
        self.lock = filelock.FileLock(self.folder / "in_use.lock")

    def interrupt(self, signum: int, _) -> None:
        if self.stop_signal and signum == signal.SIGINT:  # a second Ctrl-C does not wait for the end of the step
            sys.exit(128 + signum)
        self.stop_signal = signum

    def restore(self, **fresh) -> dict:
        """What `save` was given, by name, and the metrics; in a new run what is given here. Curves are cut back."""
        self.lock.acquire(blocking=False)  # makes the folder, too
        if not self.args.resume:
            return fresh | {"metrics": {}}
        path, expected = self.folder / "checkpoint.npz", arrays_by_name(fresh)
        about, arrays = read_npz(path)
        if layout(arrays) != layout(expected):
            fail(f"{path} is of another version of this script")
        newer = {curves.name: 0 for curves in self.folder.glob("events*")}
        for name, size in (newer | about["files"]).items():
            os.truncate(self.folder / name, size)  # an error if it is missing
        self.step, self.rng.bit_generator.state = about["step"], about["rng"]
        saved = jax.tree.unflatten(jax.tree.structure(fresh), [arrays[name] for name in expected])
        return saved | {"state": jax.device_put(saved["state"]), "metrics": about["metrics"]}

    def steps(self, timed_after: int = 0, stride: int = 1):
        """Counts the steps, until the last one or until a signal has come."""
        if not self.args.resume:
            flags = {"script": Path(__file__).stem, **vars(self.args)}
            (self.folder / "args.json").write_text(json.dumps(flags, indent=2, default=str))
        device = jax.default_backend().upper()
        print(f"Run folder {self.folder}, on the {device}, after {self.step:,} steps", flush=True)
        timed_from = max(self.step, timed_after) + 100  # by then updates run, and have compiled
        total, style = self.args.total_timesteps, {}
        if not sys.stdout.isatty():  # then a line every half minute
            line = "{n:,}/{total:,} steps, {rate_fmt}, {remaining} left{postfix}\n"
            style = {"bar_format": line, "mininterval": 30, "miniters": 1}
        self.bar = tqdm(total=total, initial=self.step, unit=" steps", file=sys.stdout, dynamic_ncols=True, **style)
        self.writer = EventFileWriter(str(self.folder))
        with contextlib.closing(self.writer), self.bar:
            while self.step < total and not self.stopped:
                self.step += stride
                yield self.step
                self.bar.update(stride)
                if self.step <= timed_from:
                    start = time.perf_counter()
                elif self.step % LOG_PERIOD == 0:
                    self.log({"charts/SPS": (self.step - timed_from) / (time.perf_counter() - start)})
        self.finish()

    def log(self, scalars: dict) -> None:
        """A number gives one curve, a vector gives `tag_0`, `tag_1`, ..."""
        points = []
        for tag, value in scalars.items():
            names = [f"{tag}_{k}" for k in range(len(value))] if np.ndim(value) else [tag]
            points += [Summary.Value(tag=name, simple_value=x) for name, x in zip(names, np.ravel(value))]
            if tag in SHOWN:
                self.shown[SHOWN[tag]] = f"{float(value):.4g}"
        self.writer.add_event(Event(wall_time=time.time(), step=self.step, summary=Summary(value=points)))
        self.bar.set_postfix(self.shown, refresh=False)

    def save_is_due(self) -> bool:
        total, period = self.args.total_timesteps, self.args.checkpoint_period or math.inf
        return self.step % period == 0 or self.step == total or self.stop_signal is not None

    def save(self, policy: dict, layers: dict, checkpoint: dict, metrics: dict) -> None:
        """The networks that play, and what it takes to go on as if the run had never stopped."""
        self.policy = jax.tree.map(lambda x: np.asarray(x) + 0, policy)  # -0 becomes 0: then the file is smaller
        if not np.isfinite(optax.tree.norm(self.policy)):
            fail(f"the networks have diverged by step {self.step}; try a lower --learning-rate")
        if self.args.checkpoint_period and self.step < self.args.total_timesteps:
            if self.stop_signal:
                self.bar.write("Stopping, with a checkpoint. Ctrl-C once more ends at once, without it", sys.stdout)
            self.writer.flush()
            files = {}
            for path in (*self.folder.glob("events*"), *self.folder.glob("replay")):
                with open(path, "rb+") as file:
                    os.fsync(file.fileno())
                files[path.name] = path.stat().st_size
            about = {"step": self.step, "rng": self.rng.bit_generator.state, "files": files, "metrics": metrics}
            write_npz(self.folder / "checkpoint.npz", about, checkpoint)
        flags = json.loads((self.folder / "args.json").read_text())
        about = {"script": flags.pop("script"), "args": flags, "step": self.step, "layers": layers}
        masks = jax.tree.map(lambda x: x != 0, self.policy)
        about["sparsity"] = {name: sparsity_of(masks[name]) for name in masks}
        write_npz(self.folder / "policy.npz", about, self.policy, np.savez_compressed)
        self.stopped = self.stop_signal is not None and self.step < self.args.total_timesteps

    def finish(self) -> None:
        """The last words. What a finished run no longer needs goes."""
        weights = np.concatenate([x.ravel() for x in jax.tree.leaves(self.policy) if x.ndim > 1])
        end = "Interrupted" if self.stopped else "Finished"
        print(f"{end} after {self.step:,} steps, with {np.count_nonzero(weights):,} of {weights.size:,} weights")
        script = Path(os.path.relpath(__file__))
        player = script.with_name("play_policy.py")
        if self.stopped and self.args.checkpoint_period:
            print(shlex.join(["python", str(script), "--resume", str(self.folder)]))
        if player.exists():
            print(shlex.join(["python", str(player), str(self.folder)]))
        print(shlex.join(["tensorboard", "--logdir", str(self.folder.parent)]), flush=True)
        if not self.stopped:
            (self.folder / "checkpoint.npz").unlink(missing_ok=True)

    def close(self) -> None:
        for signum, handler in self.handlers.items():
            signal.signal(signum, handler)  # the caller's own
        if not self.lock.is_locked:  # the folder is another process's, or there is none
            return
        self.lock.release()
        if self.step == 0 and not self.args.resume:  # the run could not start
            shutil.rmtree(self.folder)
        elif not (self.folder / "checkpoint.npz").exists():  # then nothing goes on from here
            for name in ("replay", "in_use.lock"):
                (self.folder / name).unlink(missing_ok=True)
        if self.stopped:
            sys.exit(128 + self.stop_signal)


def main(args: Args) -> None:
    if args.resume and sum(x.startswith("--") for x in sys.argv) > 1:
        fail("--resume goes on with the run's own flags: leave out all others")
    try:
        train(args)
    except filelock.Timeout:
        fail(f"another process is at work on {args.resume or 'a run of this name'}")
    except (OSError, MemoryError) as error:  # a missing file, a full disk, too little memory
        fail(str(error))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
