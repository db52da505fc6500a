# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py>=0.12", "filelock>=3.16", "flax>=0.12", "gymnasium>=1.2", "jax>=0.10", "numpy>=2",
#     "optax>=0.2.5", "tensorboard>=2.20", "tqdm>=4.66", "tyro>=1.0"]
# ///
"""EauDeDQN on Atari: Q-networks of growing sparsity share one target, and the best of them becomes the next target.

Algorithm 1 of Vincent et al., "Eau De Q-Network: Adaptive Distillation of Neural Networks in Deep Reinforcement
Learning", 2025.

    python eaudedqn_atari.py --env-id Pong
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
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
    total_timesteps: Whole = 10_000_000  # steps of the run, in the environment [t_final]
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
    target_period: Whole = 8_000  # steps between two target updates [T]
    gradient_period: Whole = 4  # steps between two gradient steps [G]
    learning_starts: Annotated[int, (1, "total_timesteps")] = 20_000  # steps played before the first gradient step
    buffer_size: Annotated[int, (2, math.inf)] = 1_000_000  # transitions in the replay memory, first in, first out [D]
    batch_size: Whole = 32  # transitions in a gradient step [B]
    gamma: Share = 0.99  # discount factor [gamma]
    learning_rate: Share = 6.25e-5  # step size of Adam
    adam_epsilon: Share = 1.5e-4  # epsilon of Adam
    epsilon_end: Share = 0.01  # share of random actions after it has fallen from 1 [epsilon]
    epsilon_duration: Whole = 250_000  # steps over which it falls, linearly


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


class Episode:
    """An episode that can be played again: the same seed and actions lead to the same observations."""

    def __init__(self, seed: int, actions: list | np.ndarray = (), score: float = 0.0):
        self.seed, self.actions, self.score = int(seed), list(actions), float(score)

    def start(self, env):
        """The first observation, or the one after the actions so far."""
        observation, _ = env.reset(seed=self.seed)
        for action in self.actions:
            observation = env.step(action)[0]
        return observation

    def add(self, action: np.ndarray, reward: float) -> None:
        self.actions.append(action)
        self.score += float(reward)

    def saved(self) -> dict:
        return {"seed": self.seed, "actions": np.array(self.actions), "score": self.score}


# ---- Replay memory ---------------------------------------------------------------------------------------------------
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


def frames_on_disk(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An array in a file, which outlives the process. On Linux its room on the disk is taken at once."""
    folder, n_bytes = path.parent, math.prod(shape)
    if not path.exists() and n_bytes > shutil.disk_usage(folder).free:
        fail(f"{folder} needs {n_bytes / 1e9:,.1f} GB: lower --buffer-size or --checkpoint-period (0 writes nothing)")
    path.touch()
    with open(path, "rb+") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, n_bytes)  # what is there already stays
    return np.memmap(path, np.uint8, "r+", shape=shape)


class ReplayMemory:
    """The last `size` transitions, first in, first out. Each frame is kept once: stacks are rebuilt when sampled."""

    def __init__(self, size: int, n_spare: int = 0, path: Path | None = None):
        """What is older than `size` stays for another `n_spare` steps, as the last checkpoint may refer to it."""
        n_rows = size + STACK + n_spare  # the oldest needs STACK - 1 frames before it, the newest one after it
        self.size, self.n_added, self.episode_step = size, 0, 0
        shape = n_rows, *FRAME  # 7.06 GB for a million; the system hands out memory as it fills
        self.frames = frames_on_disk(path, shape) if path else np.zeros(shape, np.uint8)
        columns = [("actions", np.int32), ("rewards", np.float32), ("terminals", bool), ("truncations", bool)]
        self.rows = np.zeros(n_rows, [*columns, ("episode_steps", np.int32)])

    def add(self, observations, actions, rewards, terminals, truncations, next_observations) -> None:
        """One step of one environment: every argument has a leading axis of 1."""
        row, next_row = self.n_added % len(self.frames), (self.n_added + 1) % len(self.frames)
        self.frames[row], self.frames[next_row] = observations[0, -1], next_observations[0, -1]
        self.rows[row] = actions[0], np.clip(rewards[0], -1, 1), terminals[0], truncations[0], self.episode_step
        self.n_added += 1
        self.episode_step = 0 if terminals[0] or truncations[0] else self.episode_step + 1

    def sample(self, rng: np.random.Generator, batch_size: int) -> Batch:
        steps = np.zeros(0, int)
        while len(steps) < batch_size:
            drawn = rng.integers(max(0, self.n_added - self.size), self.n_added, batch_size - len(steps))
            # DIFFERS: a transition cut by the horizon is not sampled, as the reset has replaced the frame that follows.
            steps = np.append(steps, drawn[~self.rows["truncations"][drawn % len(self.rows)]])
        rows = self.rows[steps % len(self.rows)]
        offsets = np.arange(1 - STACK, 2)
        frames = self.frames[(steps[:, None] + offsets) % len(self.frames)]  # (batch, STACK + 1, 84, 84)
        frames[-offsets > rows["episode_steps"][:, None]] = 0  # frames of the episode before
        return Batch(frames, rows["actions"], rows["rewards"], rows["terminals"])

    def saved(self) -> dict:
        """For a checkpoint. The frames are in a file of their own."""
        return {"rows": self.rows, "n_added": self.n_added, "episode_step": self.episode_step}

    def load(self, rows: np.ndarray, n_added: int, episode_step: int) -> None:
        self.rows[: len(rows)] = rows
        self.n_added, self.episode_step = int(n_added), int(episode_step)


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


def network_probabilities(losses: np.ndarray) -> np.ndarray:
    """Fig. 3, right: in proportion to 1 / L_k, times the lowest so that nothing overflows. If some losses are 0, those
    share all. A diverged network gets nothing, unless all have diverged."""
    losses = np.where(np.isfinite(losses), losses, np.inf).astype(float)
    are_lowest = losses == losses.min()
    shares = are_lowest if losses.min() in (0, np.inf) else losses.min() / losses
    return shares / shares.sum()


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


@jax.jit(static_argnums=(0, 1), donate_argnums=2)
def learn(args: Args, network: QNetwork, state: AgentState, batch: Batch) -> tuple[AgentState, dict]:
    """Alg. 1, l. 8-11: one gradient step of every network towards the shared target."""
    next_values = network.apply(state.target_params, batch.next_observations).max(axis=1)  # (batch,)
    targets = batch.rewards + args.gamma * (1 - batch.terminals) * next_values  # l. 8

    def loss(params):
        all_q_values = population_q_values(network, params, batch.observations)  # (K, batch, n_actions)
        q_values = all_q_values[:, jnp.arange(len(targets)), batch.actions]  # (K, batch)
        # DIFFERS: the mean over the batch; the paper's algorithms write the sum.
        losses = jnp.mean((targets - q_values) ** 2, axis=1)  # (K,)
        return losses.sum(), (losses, q_values.mean(axis=1))  # the gradient of the sum is that of each one's own loss

    grads, (losses, mean_q_values) = jax.grad(loss, has_aux=True)(state.params)  # l. 9-10
    updates, opt_state = jax.vmap(make_optimizer(args).update)(grads, state.opt_state)  # l. 11
    params = optax.apply_updates(state.params, updates)
    params = jax.tree.map(jnp.multiply, params, state.masks)  # what was pruned stays pruned

    losses_or_inf = jnp.where(jnp.isfinite(losses), losses, jnp.inf)  # infinite: never drawn, never selected
    cumulated_losses = state.cumulated_losses + losses_or_inf  # l. 11, too
    state = state._replace(params=params, opt_state=opt_state, cumulated_losses=cumulated_losses)
    return state, {"losses/td_loss": losses.mean(), "losses/q_values": mean_q_values.mean()}


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
def behaviour_actions(network: QNetwork, params, idx: int, observations: np.ndarray) -> jax.Array:
    """Of network `idx` alone: one forward pass, not K."""
    return network.apply(network_at(params, idx), observations).argmax(axis=1)


# ---- Training --------------------------------------------------------------------------------------------------------
def train(args: Args) -> Path:
    args = load_args(args) if args.resume else args
    check_args(args)
    args = dataclasses.replace(args, env_id=canonical_name(args.env_id))
    rng = np.random.default_rng(args.seed)
    env = make_env(args.env_id, n_envs=1, horizon=args.horizon)
    network = QNetwork(args.features, int(env.single_action_space.n))
    state = init_agent(args, network, jax.random.key(args.seed))  # Alg. 1, l. 1
    size = min(args.buffer_size, args.total_timesteps)
    n_spare = min(args.checkpoint_period, args.total_timesteps - size)
    with contextlib.closing(Run(args, rng)) as run:
        episode = Episode(seed=rng.integers(2**30))
        empty = ReplayMemory(0).saved()  # the memory itself would make the file of its frames, if it is missing
        saved = run.restore(state=state, memory=empty, episode=episode.saved())  # in a new run, just these
        state, metrics, episode = saved["state"], saved["metrics"], Episode(**saved["episode"])
        memory = ReplayMemory(size, n_spare, run.folder / "replay" if args.checkpoint_period else None)
        memory.load(**saved["memory"])
        observations = episode.start(env)  # (1, STACK, 84, 84), one environment
        for step in run.steps(timed_after=args.learning_starts):  # l. 2
            behaviour_idx = rng.choice(args.n_networks, p=network_probabilities(state.cumulated_losses))  # l. 3
            epsilon = np.interp(step, (0, args.epsilon_duration), (1, args.epsilon_end))
            if rng.random() < epsilon:  # l. 4
                actions = rng.integers(network.n_actions, size=1)
            else:
                actions = np.asarray(behaviour_actions(network, state.params, behaviour_idx, observations))
            # DIFFERS: an update samples before the newest transition is added, as the environment runs meanwhile.
            if step > args.learning_starts and step % args.gradient_period == 0:  # l. 6
                batch = memory.sample(rng, args.batch_size)  # l. 7
                state, metrics = learn(args, network, state, batch)  # l. 8-11, goes on while the next lines run
            next_observations, rewards, terminals, truncations, _ = env.step(actions)
            episode.add(actions, rewards[0])
            if terminals[0] or truncations[0]:
                run.log({"charts/episodic_return": episode.score, "charts/episodic_length": len(episode.actions)})
                episode = Episode(seed=rng.integers(2**30))
                next_observations = episode.start(env)  # of the next episode: nobody learns from it
            memory.add(observations, actions, rewards, terminals, truncations, next_observations)  # l. 5
            observations = next_observations

            # DIFFERS: no target update without a gradient step since the last one, when all cumulated losses are 0.
            if step % args.target_period == 0 and state.cumulated_losses.any():  # l. 12
                losses = checked_losses(state, step)
                target_idx = losses.argmin()  # l. 13
                state = state._replace(target_params=network_at(state.params, target_idx))
                parents = select_population(rng, losses, args.tournament_size)  # l. 14
                run.log({"sparsity/target": state.sparsities[target_idx], "sparsity/network": state.sparsities})
                run.log({"losses/cumulated": losses, "population/parent": parents})
                state = prune_copies(args, rng, state, parents, step)  # l. 15
                state = state._replace(cumulated_losses=jnp.zeros(args.n_networks))  # l. 16
                run.log({"population/distinct": count_distinct(state.params)})

            if step % LOG_PERIOD == 0:
                run.log({"charts/epsilon": epsilon, **metrics})
            if run.save_is_due():
                checkpoint = {"state": state, "memory": memory.saved(), "episode": episode.saved()}
                layers = {"target": getattr(network, "layers", {})}  # without them `play_policy.py` cannot play it
                run.save({"target": state.target_params}, layers, checkpoint, metrics)
        first_gradient_step = (args.learning_starts // args.gradient_period + 1) * args.gradient_period
        last_target_update = step // args.target_period * args.target_period
        if last_target_update < first_gradient_step:
            print("The policy is an untrained network: no target update came after a gradient step")
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
