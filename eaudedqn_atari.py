# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py>=0.12", "filelock>=3.16", "flax>=0.12", "gymnasium>=1.2", "jax>=0.10", "numpy>=2",
#     "optax>=0.2.5", "tensorboard>=2.20", "tyro>=1.0"]
# ///
"""EauDeDQN on Atari: Q-networks of growing sparsity share one target, and the best of them becomes the next target.

Algorithm 1 of Vincent et al., "Eau De Q-Network: Adaptive Distillation of Neural Networks in Deep Reinforcement
Learning", 2025.

    python eaudedqn_atari.py --env-id Pong
"""

import contextlib
import dataclasses
import datetime
import difflib
import functools
import json
import math
import os
import re
import shutil
import signal
import sys
import time
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
    total_timesteps: int = 10_000_000  # steps of the run: in the environment online, of the gradient offline [t_final]
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
    target_period: int = 8_000  # steps between two target updates [T]
    gradient_period: int = 4  # steps between two gradient steps [G]
    learning_starts: int = 20_000  # steps played before the first gradient step
    buffer_size: int = 1_000_000  # transitions in the replay memory, first in, first out [D]
    batch_size: int = 32  # transitions in a gradient step [B]
    gamma: float = 0.99  # discount factor [gamma]
    learning_rate: float = 6.25e-5  # step size of Adam
    adam_epsilon: float = 1.5e-4  # epsilon of Adam
    epsilon_end: float = 0.01  # share of random actions after it has fallen from 1 [epsilon]
    epsilon_duration: int = 250_000  # steps over which it falls, linearly


SMALLEST = {"seed": 0, "checkpoint_period": 0, "horizon": 2, "buffer_size": 2}  # all other whole numbers: 1
LARGEST = {"seed": 2**31 - 1, "horizon": 2**29 - 1, "max_noise": 1e9, "cql_alpha": 1e9}  # all other fractions: 1
NOT_SMALLER = {"n_networks": "tournament_size", "total_timesteps": "learning_starts"}


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


# ---- Replay memory ---------------------------------------------------------------------------------------------------
class Batch(NamedTuple):
    frames: np.ndarray  # (batch, STACK + 1, 84, 84) uint8: [:, :-1] is the observation, [:, 1:] the next one
    actions: np.ndarray  # (batch,) int32
    rewards: np.ndarray  # (batch,) float32
    terminals: np.ndarray  # (batch,) bool


def frames_on_disk(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An array in a file, which outlives the process. On Linux its room on the disk is taken at once."""
    n_bytes = math.prod(shape)
    if not path.exists() and n_bytes > shutil.disk_usage(path.parent).free:
        fail(f"{path} needs {n_bytes / 1e9:,.1f} GB: lower --buffer-size, or keep it in RAM with --checkpoint-period 0")
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
        self.size, self.n_added, self.age = size, 0, 0
        shape = n_rows, *FRAME  # 7.06 GB for a million; the system hands out memory as it fills
        self.frames = frames_on_disk(path, shape) if path else np.zeros(shape, np.uint8)
        columns = [("actions", np.int32), ("rewards", np.float32), ("terminals", bool), ("truncations", bool)]
        self.rows = np.zeros(n_rows, [*columns, ("ages", np.int32)])  # age: steps since the start of the episode

    def add(self, observations, actions, rewards, terminals, truncations, next_observations) -> None:
        """One step of one environment: every argument has a leading axis of 1."""
        row, next_row = self.n_added % len(self.frames), (self.n_added + 1) % len(self.frames)
        self.frames[row], self.frames[next_row] = observations[0, -1], next_observations[0, -1]
        self.rows[row] = actions[0], np.clip(rewards[0], -1, 1), terminals[0], truncations[0], self.age
        self.n_added += 1
        self.age = 0 if terminals[0] or truncations[0] else self.age + 1

    def sample(self, rng: np.random.Generator, batch_size: int) -> Batch:
        steps = np.zeros(0, int)
        while len(steps) < batch_size:
            drawn = rng.integers(max(0, self.n_added - self.size), self.n_added, batch_size - len(steps))
            # DIFFERS: a transition cut by the horizon is not sampled, as the reset has replaced the frame that follows.
            steps = np.append(steps, drawn[~self.rows["truncations"][drawn % len(self.rows)]])
        rows, offsets = self.rows[steps % len(self.rows)], np.arange(1 - STACK, 2)
        frames = self.frames[(steps[:, None] + offsets) % len(self.frames)]  # (batch, STACK + 1, 84, 84)
        frames[-offsets > rows["ages"][:, None]] = 0  # frames of the episode before
        return Batch(frames, rows["actions"], rows["rewards"], rows["terminals"])


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


def network_probabilities(losses: np.ndarray) -> np.ndarray:
    """Fig. 3, right: in proportion to 1 / L_k. If some losses are 0, those share all; diverged networks get nothing."""
    losses = np.where(np.isfinite(losses), losses, np.inf).astype(float)
    lowest = losses.min()
    weights = losses == lowest if lowest in (0, np.inf) else lowest / losses
    return weights / weights.sum()


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


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def learn(args: Args, network: QNetwork, state: AgentState, batch: Batch) -> tuple[AgentState, dict]:
    """Alg. 1, l. 8-11: one gradient step of every network towards the shared target."""
    next_values = network.apply(state.target_params, batch.frames[:, 1:]).max(axis=1)  # (batch,)
    targets = batch.rewards + args.gamma * (1 - batch.terminals) * next_values  # l. 8

    def loss(params):
        all_q_values = population_q_values(network, params, batch.frames[:, :-1])  # (K, batch, n_actions)
        q_values = all_q_values[:, jnp.arange(len(targets)), batch.actions]  # (K, batch)
        # DIFFERS: the mean over the batch; the paper's algorithms write the sum.
        losses = jnp.mean((targets - q_values) ** 2, axis=1)  # (K,)
        return losses.sum(), (losses, q_values.mean(axis=1))  # the gradient of the sum is that of each one's own loss

    grads, (losses, q_values) = jax.grad(loss, has_aux=True)(state.params)  # l. 9-10
    updates, opt_state = jax.vmap(make_optimizer(args).update)(grads, state.opt_state)  # l. 11
    params = optax.apply_updates(state.params, updates)
    params = jax.tree.map(jnp.multiply, params, state.masks)  # what was pruned stays pruned

    cumulated_losses = state.cumulated_losses + jnp.where(jnp.isfinite(losses), losses, jnp.inf)
    state = state._replace(params=params, opt_state=opt_state, cumulated_losses=cumulated_losses)
    return state, {"losses/td_loss": losses.mean(), "losses/q_values": q_values.mean()}


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
def behaviour_actions(network: QNetwork, params, idx: int, observations: np.ndarray) -> jax.Array:
    """Of network `idx` alone: one forward pass, not K."""
    return network.apply(network_at(params, idx), observations).argmax(axis=1)


# ---- Training --------------------------------------------------------------------------------------------------------
def train(args: Args) -> Path:
    args = load_args(args) if args.resume else args
    check_args(args)
    args = dataclasses.replace(args, env_id=canonical_name(args.env_id))
    rng, env = np.random.default_rng(args.seed), make_env(args.env_id, n_envs=1, horizon=args.horizon)
    network = QNetwork(args.features, int(env.single_action_space.n))
    state = init_agent(args, network, jax.random.key(args.seed))  # Alg. 1, l. 1
    size = min(args.buffer_size, args.total_timesteps)
    n_spare = min(args.checkpoint_period, args.total_timesteps - size)
    with contextlib.closing(Run(args)) as run:
        seed, played, score, metrics = int(rng.integers(2**30)), [], 0.0, {}  # of the episode: seed, actions, return
        saved = run.restore(rng, (state, 0, 0)) if args.resume else None
        memory = ReplayMemory(size, n_spare, run.folder / "replay" if args.checkpoint_period else None)
        if saved:
            (state, memory.rows[:], played), (seed, score, metrics, memory.n_added, memory.age) = saved
            state, played = jax.device_put(state), list(played)
        observations, _ = env.reset(seed=seed)  # (1, STACK, 84, 84), one environment
        for actions in played:  # the same seed and actions lead to the same observation each time
            observations = env.step(actions)[0]
        for step in run.steps(args.learning_starts):  # l. 2
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
            played.append(actions)
            score += rewards[0]
            if terminals[0] or truncations[0]:
                run.log({"charts/episodic_return": score, "charts/episodic_length": len(played)})
                seed, played, score = int(rng.integers(2**30)), [], 0.0
                next_observations, _ = env.reset(seed=seed)  # so that --resume can play the episode again
            memory.add(observations, actions, rewards, terminals, truncations, next_observations)  # l. 5
            observations = next_observations
            if not np.isfinite(state.cumulated_losses).any():
                fail(f"all networks have diverged at step {step}; try a lower --learning-rate")

            # DIFFERS: no target update before the first gradient step, when all cumulated losses are 0.
            if step % args.target_period == 0 and state.cumulated_losses.any():  # l. 12
                target_idx = state.cumulated_losses.argmin()  # l. 13
                state = state._replace(target_params=network_at(state.params, target_idx))
                run.log({"sparsity/target": state.sparsities[target_idx], "sparsity/network": state.sparsities})
                parents = select_population(rng, state.cumulated_losses, args.tournament_size)  # l. 14
                run.log({"losses/cumulated": state.cumulated_losses, "population/parent": parents})
                state = prune_copies(args, rng, state, parents, step)  # l. 15
                state = state._replace(cumulated_losses=jnp.zeros(args.n_networks))  # l. 16

            if step % LOG_PERIOD == 0:
                run.log({"charts/epsilon": epsilon, **metrics})
            if run.save_is_due():
                notes = seed, score, metrics, memory.n_added, memory.age
                run.save({"target": state.target_params}, rng, (state, memory.rows, np.array(played)), notes)
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
