# /// script
# requires-python = ">=3.11"
# dependencies = ["flax>=0.12", "gymnasium[mujoco]>=1.2", "imageio>=2.34", "jax>=0.10", "mujoco>=3.1", "numpy>=2",
#     "optax>=0.2.5", "rich>=14", "tensorboard>=2.20", "tyro>=1.0"]
# ///
"""EauDeSAC on MuJoCo: two populations of critics of growing sparsity, and in each the best gives the shared target.

Algorithm 2 of Vincent et al., "Eau De Q-Network: Adaptive Distillation of Neural Networks in Deep Reinforcement
Learning", 2025, on top of Soft Actor-Critic (Haarnoja et al., 2018) as in SBX.

    python eaudesac_mujoco.py --env-id HalfCheetah
    tensorboard --logdir runs
"""

import contextlib
import dataclasses
import datetime
import difflib
import fcntl
import functools
import hashlib
import io
import json
import math
import os
import pickle
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import flax.linen as nn
import flax.traverse_util
import gymnasium
import imageio.v3 as imageio
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import optax
import tyro
from rich.progress import BarColumn, Progress
from tensorboard.summary import Writer

LOG_STD_MIN, LOG_STD_MAX = -20, 2  # limits of the actor's logarithm of a standard deviation
LOG_PERIOD = 1_000  # steps between two points of the curves that have a value at every step
EVAL_SEED = 10_000  # of the first episode of every evaluation; the next ones count up


# ---- Arguments: the defaults are the paper's, where it has them ------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "HalfCheetah"  # what to play: Pong or ALE/Pong-v5 on Atari, Ant or Ant-v5 on MuJoCo
    seed: int = 1  # seed of everything that is random
    total_timesteps: int = 1_000_000  # steps of the run: in the environment online, of the gradient offline [t_final]
    runs_dir: Path = Path("runs")  # folder in which the run gets a folder of its own
    checkpoint_period: int = 50_000  # steps between two checkpoints, from which the run can go on; 0 writes none
    resume: Path | None = None  # folder of a run to go on with, under its own flags
    evaluate: Path | None = None  # policy.npz to play, instead of training
    capture_video: Path | None = None  # .gif file for the first episode of --evaluate
    critic_features: tuple[int, ...] = (256, 256)  # widths of the hidden layers of a critic
    actor_features: tuple[int, ...] = (256, 256)  # widths of the hidden layers of the actor
    n_networks: int = 5  # online networks that learn side by side [K]
    tournament_size: int = 3  # networks drawn for a tournament, which the lowest cumulated loss wins [M]
    max_noise: float = 3.0  # a pruning's size is scaled by a random number from 0 to this; 0 never prunes [U_max]
    max_speed: float = 0.01  # largest share of the remaining weights that one pruning removes [S_max]
    actor_final_sparsity: float = 0.0  # sparsity of the actor at the end of its schedule, Eq. (2); 0 never prunes it
    pruning_power: int = 3  # steepness of the schedule, which is fastest at its start [n]
    pruning_start: float = 0.2  # share of the run at which the schedule of Eq. (2) starts [t_start]
    pruning_end: float = 0.8  # share of the run at which it ends, and the sparsity stays [t_end]
    pruning_period: int = 1_000  # steps between two prunings [P]
    sparsity_distribution: Literal["uniform", "erk"] = "uniform"  # same sparsity in all tensors, or Erdos-Renyi-Kernel
    learning_starts: int = 5_000  # steps played before the first gradient step
    buffer_size: int = 1_000_000  # transitions in the replay memory, first in, first out [D]
    batch_size: int = 256  # transitions in a gradient step [B]
    gamma: float = 0.99  # discount factor [gamma]
    tau: float = 0.005  # weight of the newest in the moving averages: of the targets, of the cumulated losses [tau]
    learning_rate: float = 1e-3  # step size of Adam
    adam_epsilon: float = 1e-8  # epsilon of Adam
    utd: int = 1  # gradient steps of the critics in each step of the environment [UTD]
    policy_delay: int = 1  # steps between two gradient steps of the actor and of the temperature
    eval_period: int = 10_000  # steps between two evaluations
    eval_episodes: int = 10  # episodes of an evaluation, played side by side


# Whole numbers are at least 1, others between 0 and 1, but for these limits. In a pair the first is not the smaller.
LIMITS = {"seed": (0, 2**31 - 1), "checkpoint_period": (0, math.inf)}
LIMITS |= {"critic_features": (1, math.inf), "actor_features": (1, math.inf), "tau": (1e-6, 1)}
LIMITS |= {"max_noise": (0, 1e9), "actor_final_sparsity": (0, 0.9999)}
PAIRS = {"n_networks": "tournament_size", "pruning_end": "pruning_start", "learning_starts": "batch_size"}
PAIRS["total_timesteps"] = "learning_starts"


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
    """The task's full id: `Ant-v5` for `Ant-v5`, `Ant` and `ant`. The newest version if there is none in the name."""
    specs = sorted(gymnasium.registry.values(), key=lambda spec: spec.version or 0)
    known = {name.lower(): spec.id for spec in specs for name in (spec.name, spec.id) if not spec.namespace}
    if env_id.lower() not in known:
        tasks = {spec.name.lower(): spec.name for spec in specs if "mujoco" in str(spec.entry_point)}
        closest = [tasks[name] for name in difflib.get_close_matches(env_id.lower(), tasks, n=3, cutoff=0)]
        fail(f"unknown MuJoCo task {env_id!r}; the closest names are {', '.join(closest)}")
    return known[env_id.lower()]


def make_env(env_id: str, **options) -> gymnasium.Env:
    """The task with its own time limit, 1,000 steps in those of the paper [H], and actions scaled to [-1, 1]."""
    name = env_name(env_id)
    mujoco.set_mju_user_warning(lambda message: None)  # of model files, which are Gymnasium's and not the user's
    try:
        env = gymnasium.make(name, disable_env_checker=True, **options)
    except (gymnasium.error.Error, ImportError) as error:
        fail(f"{name} cannot be made: {error}")
    finally:
        mujoco.set_mju_user_warning(None)
    box, observations, actions = gymnasium.spaces.Box, env.observation_space, env.action_space
    if not isinstance(observations, box) or len(observations.shape) != 1:
        fail(f"{name} has observations {observations}: they must be a vector of numbers, as in HalfCheetah")
    if not isinstance(actions, box) or len(actions.shape) != 1 or not actions.is_bounded():
        fail(f"{name} has actions {actions}: they must be a vector of bounded numbers, as in HalfCheetah")
    return gymnasium.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))  # plain floats draw a warning


def replay_episode(env, episode: list) -> np.ndarray:
    """Play it once more: an episode is its seed and its actions. They lead to the same observation each time."""
    observations, _ = env.reset(seed=episode[0])
    for actions in episode[1:]:
        observations = env.step(actions)[0]
    return observations


# ---- Replay memory ---------------------------------------------------------------------------------------------------
class Transitions(NamedTuple):
    observations: np.ndarray  # (..., n_observations), all are float32
    actions: np.ndarray  # (..., n_actions), from -1 to 1
    rewards: np.ndarray  # (...)
    next_observations: np.ndarray  # (..., n_observations)
    terminals: np.ndarray  # (...), 1 at a terminal state, 0 also where the time limit cuts the episode


class TransitionMemory:
    """The last `size` transitions, first in, first out."""

    def __init__(self, size: int, n_observations: int, n_actions: int):
        shapes = (n_observations,), (n_actions,), (), (n_observations,), ()
        self.rows = Transitions(*(np.zeros((size, *shape), np.float32) for shape in shapes))
        self.size, self.n_added, self.nbytes = size, 0, sum(column.nbytes for column in self.rows)

    def add(self, *transition) -> None:
        for column, value in zip(self.rows, transition):
            column[self.n_added % self.size] = value
        self.n_added += 1

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Transitions:
        rows = rng.integers(min(self.n_added, self.size), size=shape)
        return Transitions(*(column[rows] for column in self.rows))


# ---- Network: actor and critic ---------------------------------------------------------------------------------------
class Actor(nn.Module):
    features: tuple[int, ...]
    n_actions: int

    @nn.compact
    def __call__(self, observations: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = observations
        for features in self.features:
            x = nn.relu(nn.Dense(features)(x))
        mean, log_std = nn.Dense(self.n_actions)(x), nn.Dense(self.n_actions)(x)  # (..., n_actions)
        return mean, jnp.clip(log_std, LOG_STD_MIN, LOG_STD_MAX)


class Critic(nn.Module):
    features: tuple[int, ...]

    @nn.compact
    def __call__(self, observations: jax.Array, actions: jax.Array) -> jax.Array:
        x = jnp.concatenate([observations, actions], axis=-1)
        for features in self.features:
            x = nn.relu(nn.Dense(features)(x))
        return nn.Dense(1)(x)[..., 0]  # (...,)


def squashed_gaussian(mean: jax.Array, log_std: jax.Array, noise: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Actions tanh(mean + std * noise), where `noise` is standard normal, and the logarithm of their density."""
    x = mean + jnp.exp(log_std) * noise
    log_normal = -0.5 * noise**2 - log_std - 0.5 * math.log(2 * math.pi)
    log_slope = 2 * (math.log(2) - x - nn.softplus(-2 * x))  # log(1 - tanh(x)**2), which would round to log(0)
    return jnp.tanh(x), (log_normal - log_slope).sum(axis=-1)


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


def polynomial_sparsity(step: int, total_steps: int, final_sparsity, start, end, power) -> float:
    """Eq. (2): from 0 at `start` to `final_sparsity` at `end`, both shares of `total_steps`."""
    progress = (step - start * total_steps) / ((end - start) * total_steps or 1)
    return final_sparsity * (1 - (1 - min(max(progress, 0.0), 1.0)) ** power)


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
    """All that learning changes. The two critics are the first axis of theirs, the population the second, K."""

    actor_params: dict  # (...) [phi]
    log_temperature: jax.Array  # () [log alpha]
    actor_opt_state: optax.OptState  # of the actor and the temperature
    actor_masks: dict  # (...) bool, False where a weight is pruned
    params: dict  # (2, K, ...), pruned weights are exactly 0 [theta]
    target_params: dict  # (2, K, ...), not masked: they follow params [theta-bar]
    opt_state: optax.OptState  # (2, K, ...)
    masks: dict  # (2, K, ...) bool, False where a weight is pruned
    cumulated_losses: jax.Array  # (2, K), moving average since the last tournament [L_k]
    sparsities: jax.Array  # (2, K) [s_t]
    target_idx: jax.Array  # (2,), the networks whose targets make the shared target [psi]


def make_optimizer(args: Args) -> optax.GradientTransformation:
    return optax.adam(args.learning_rate, eps=args.adam_epsilon)


def network_at(stacked, idx):
    """What is at `idx` in all tensors of a tree: one network of a population, or one of each critic's."""
    return jax.tree.map(lambda x: x[idx], stacked)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def init_agent(args: Args, actor: Actor, critic: Critic, key: jax.Array, observation: np.ndarray) -> AgentState:
    actor_key, critic_key = jax.random.split(key)
    actor_params, log_temperature = actor.init(actor_key, observation), jnp.asarray(0.0)
    init_critic = functools.partial(critic.init, observations=observation, actions=np.zeros(actor.n_actions))
    params = jax.vmap(jax.vmap(init_critic))(jax.random.split(critic_key, (2, args.n_networks)))
    return AgentState(
        actor_params=actor_params,
        log_temperature=log_temperature,
        actor_opt_state=make_optimizer(args).init((actor_params, log_temperature)),
        actor_masks=jax.tree.map(lambda x: jnp.ones(x.shape, bool), actor_params),
        params=params,
        target_params=jax.tree.map(jnp.copy, params),
        opt_state=jax.vmap(jax.vmap(make_optimizer(args).init))(params),
        masks=jax.tree.map(lambda x: jnp.ones(x.shape, bool), params),
        cumulated_losses=jnp.zeros((2, args.n_networks)),
        sparsities=jnp.zeros((2, args.n_networks)),
        target_idx=jnp.zeros(2, int),
    )


# ---- Learning --------------------------------------------------------------------------------------------------------
def soft_values(actor: Actor, critic: Critic, state: AgentState, critic_pair, observations: jax.Array, noise):
    """min_i Q_i(s, a) - alpha log pi(a | s) for a drawn action a in each state s, and log pi(a | s); both (batch,)."""
    mean, log_std = actor.apply(state.actor_params, observations)
    actions, log_probs = squashed_gaussian(mean, log_std, noise)
    q_values = jax.vmap(critic.apply, in_axes=(0, None, None))(critic_pair, observations, actions)  # (2, batch)
    return q_values.min(axis=0) - jnp.exp(state.log_temperature) * log_probs, log_probs


def learn_critics(args: Args, actor: Actor, critic: Critic, state: AgentState, batch: Transitions, noise):
    """Alg. 2, l. 6-10: one gradient step of all critics towards the shared target."""
    target_pair = network_at(state.target_params, (jnp.arange(2), state.target_idx))  # (2, ...)
    next_values, _ = soft_values(actor, critic, state, target_pair, batch.next_observations, noise)
    targets = batch.rewards + args.gamma * (1 - batch.terminals) * next_values  # l. 6

    def td_loss(params):
        q_values = critic.apply(params, batch.observations, batch.actions)  # (batch,)
        # DIFFERS: the mean over the batch; the paper's algorithms write the sum.
        return jnp.mean((targets - q_values) ** 2), jnp.mean(q_values)

    (losses, q_values), grads = jax.vmap(jax.vmap(jax.value_and_grad(td_loss, has_aux=True)))(state.params)  # l. 7-8
    updates, opt_state = jax.vmap(jax.vmap(make_optimizer(args).update))(grads, state.opt_state)  # l. 9
    params = optax.apply_updates(state.params, updates)
    params = jax.tree.map(jnp.multiply, params, state.masks)  # what was pruned stays pruned
    target_params = optax.incremental_update(params, state.target_params, args.tau)

    averages = (1 - args.tau) * state.cumulated_losses + args.tau * losses
    cumulated_losses = jnp.where(jnp.isfinite(averages), averages, jnp.inf)
    state = state._replace(params=params, target_params=target_params, opt_state=opt_state)
    state = state._replace(cumulated_losses=cumulated_losses, target_idx=cumulated_losses.argmin(axis=1))  # l. 10
    return state, {"losses/qf_loss": losses.mean(), "losses/qf_values": q_values.mean()}


def learn_actor(args: Args, actor: Actor, critic: Critic, state: AgentState, critic_pair, observations, noise):
    """Alg. 2, l. 12: one gradient step of the actor, and of the temperature towards an entropy of -n_actions."""

    def actor_loss(actor_params):
        new_state = state._replace(actor_params=actor_params)
        values, log_probs = soft_values(actor, critic, new_state, critic_pair, observations, noise)
        return -jnp.mean(values), -jnp.mean(log_probs)

    (loss, entropy), actor_grads = jax.value_and_grad(actor_loss, has_aux=True)(state.actor_params)
    grads = actor_grads, entropy + actor.n_actions  # the latter of log_temperature * (entropy - target entropy)
    updates, actor_opt_state = make_optimizer(args).update(grads, state.actor_opt_state)
    actor_params, log_temperature = optax.apply_updates((state.actor_params, state.log_temperature), updates)
    actor_params = jax.tree.map(jnp.multiply, actor_params, state.actor_masks)
    metrics = {"losses/actor_loss": loss, "losses/entropy": entropy, "losses/alpha": jnp.exp(state.log_temperature)}
    state = state._replace(actor_params=actor_params, log_temperature=log_temperature, actor_opt_state=actor_opt_state)
    return state, metrics


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 7), donate_argnums=3)
def learn(args: Args, actor: Actor, critic: Critic, state: AgentState, batches: Transitions, noise, times, with_actor):
    """Alg. 2, l. 4-12. `batches` is (utd, batch, ...), `noise` has one more for the actor, who learns from the last."""
    for i in range(args.utd):
        batch = jax.tree.map(lambda x, i=i: x[i], batches)
        state, metrics = learn_critics(args, actor, critic, state, batch, noise[i])
    if with_actor:
        # `times` (2, K) is exponential, so times * L_k is too, with rate 1 / L_k: network k is first with p ~ 1 / L_k.
        behaviour_idx = (times * state.cumulated_losses).argmin(axis=1)  # (2,) l. 11
        critic_pair = network_at(state.params, (jnp.arange(2), behaviour_idx))  # (2, ...)
        state, actor_metrics = learn_actor(args, actor, critic, state, critic_pair, batch.observations, noise[-1])
        metrics |= actor_metrics
    return state, metrics


def prune_critic_copies(args: Args, rng: np.random.Generator, state: AgentState, parents: np.ndarray, step: int):
    """Alg. 2, l. 15: the duplicated networks are pruned to a sparsity drawn by Eq. (3), all others stay as they are."""
    fields = "params", "target_params", "opt_state", "masks", "sparsities"
    population = jax.tree.map(np.array, [getattr(state, field) for field in fields])  # numpy ranks weights faster
    for i, k in np.argwhere(parents != np.arange(args.n_networks)):
        params, target_params, _, _, sparsity = network_at(population, (i, parents[i, k]))
        noise, next_step = rng.uniform(0, args.max_noise), step + args.pruning_period
        sparsity = next_sparsity(float(sparsity), noise, step, next_step, args.total_timesteps, args.max_speed)
        masks = magnitude_masks(params, sparsity, args.sparsity_distribution)
        params = jax.tree.map(np.multiply, params, masks)  # the target stays as it is, and follows
        copy = params, target_params, make_optimizer(args).init(params), masks, sparsity  # copies start a new Adam
        for tensor, value in zip(jax.tree.leaves(population), jax.tree.leaves(copy)):
            tensor[i, k] = value
    return state._replace(**dict(zip(fields, jax.device_put(population))))


def prune_actor(args: Args, state: AgentState, step: int) -> AgentState:
    """The mask for the sparsity of Eq. (2). The optimizer goes on as it is."""
    schedule = args.actor_final_sparsity, args.pruning_start, args.pruning_end, args.pruning_power
    sparsity = polynomial_sparsity(step, args.total_timesteps, *schedule)
    masks = magnitude_masks(jax.device_get(state.actor_params), sparsity, args.sparsity_distribution)
    return state._replace(actor_params=jax.tree.map(jnp.multiply, state.actor_params, masks), actor_masks=masks)


# ---- Acting ----------------------------------------------------------------------------------------------------------
@functools.partial(jax.jit, static_argnums=0)
def policy_actions(actor: Actor, params, observations: np.ndarray, noise: np.ndarray | float) -> jax.Array:
    """Without noise, the deterministic policy."""
    return squashed_gaussian(*actor.apply(params, observations), noise)[0]


def evaluate_actor(envs: list[gymnasium.Env], actor: Actor, params) -> np.ndarray:
    """Returns of one deterministic episode in each environment, which starts as in every evaluation."""
    observations = np.stack([env.reset(seed=EVAL_SEED + i)[0] for i, env in enumerate(envs)])
    returns, playing = np.zeros(len(envs)), np.ones(len(envs), bool)
    while playing.any():
        actions = np.asarray(policy_actions(actor, params, observations, 0.0))
        for i in np.flatnonzero(playing):
            observations[i], reward, terminal, truncation, _ = envs[i].step(actions[i])
            returns[i] += reward
            playing[i] = not (terminal or truncation)
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
    envs = [make_env(about["env_id"]) for _ in range(args.eval_episodes)]
    if args.capture_video:
        if sys.platform == "linux" and "DISPLAY" not in os.environ:  # a server: draw without a screen
            os.environ.setdefault("MUJOCO_GL", "egl")
        try:
            envs[0] = make_env(about["env_id"], render_mode="rgb_array_list")
            envs[0].reset()
        except Exception as error:  # each driver has its own
            fail(f"MuJoCo cannot render on this machine ({error}): leave out --capture-video")
    actor = Actor(tuple(about["actor_features"]), *envs[0].action_space.shape)
    returns = evaluate_actor(envs, actor, networks["actor"])
    sparsities = ", ".join(f"{name} {sparsity:.3f}" for name, sparsity in about["sparsity"].items())
    print(f"{about['env_id']}, {about['script']}.py after {about['step']:,} steps, sparsity of {sparsities}")
    print(f"Return {returns.mean():.1f} +- {returns.std():.1f}, mean and standard deviation of {len(returns)} episodes")
    print("Each:", *np.round(returns, 1))
    if args.capture_video:
        frames = [frame[::2, ::2] for frame in envs[0].render()[::2]]  # half the steps, half the pixels: a small file
        imageio.imwrite(args.capture_video, frames, duration=2_000 / envs[0].metadata["render_fps"], loop=0)


# ---- Training --------------------------------------------------------------------------------------------------------
def train(args: Args) -> Path:
    args, saved = load_run(args)
    check_args(args)
    rng = np.random.default_rng(args.seed)
    env, *eval_envs = [make_env(args.env_id) for _ in range(1 + args.eval_episodes)]
    (n_observations,), (n_actions,) = env.observation_space.shape, env.action_space.shape
    actor, critic = Actor(args.actor_features, n_actions), Critic(args.critic_features)
    episode, metrics = [int(rng.integers(2**31))], {}  # the seed and the actions of the current episode
    state = init_agent(args, actor, critic, jax.random.key(args.seed), np.zeros(n_observations))  # Alg. 2, l. 1
    memory = TransitionMemory(args.buffer_size, n_observations, n_actions)
    n_weights = sum(x[0, 0].size for x in jax.tree.leaves(state.params))
    header = (
        f"EauDeSAC on {env_name(args.env_id)}, seed {args.seed}, on the {jax.default_backend().upper()}\n"
        f"2 x {args.n_networks} critics of {n_weights:,} parameters, features {args.critic_features}\n"
        f"Replay memory of {args.buffer_size:,} transitions, {memory.nbytes / 1e9:.2f} GB when full"
    )
    with contextlib.closing(Run(args, header, saved)) as run:
        if saved:
            state = jax.tree.unflatten(jax.tree.structure(state), jax.device_put(saved.pop("state")))
            rng.bit_generator.state, episode, metrics = saved["rng"], saved["episode"], saved["metrics"]
            memory.n_added = saved["n_added"]
            for column, values in zip(memory.rows, saved.pop("rows")):
                column[: len(values)] = values
        else:
            run.log({"sparsity/target": 0.0})
        observation = replay_episode(env, episode)
        for step in run.steps():  # l. 2
            if step <= args.learning_starts:
                action = rng.uniform(-1, 1, n_actions)
            else:
                action = policy_actions(actor, state.actor_params, observation, rng.standard_normal(n_actions))  # l. 3
                # DIFFERS: an update samples before the newest transition is added, as the environment runs meanwhile.
                batches = memory.sample(rng, (args.utd, args.batch_size))  # l. 5
                noise = rng.standard_normal((args.utd + 1, args.batch_size, n_actions), np.float32)
                times = rng.standard_exponential((2, args.n_networks))
                with_actor = step % args.policy_delay == 0
                state, new_metrics = learn(args, actor, critic, state, batches, noise, times, with_actor)  # l. 4-12
                metrics |= new_metrics
                run.clock = run.clock or (step, time.monotonic())  # SPS counts from the first update, which compiles
            episode.append(np.asarray(action))  # waits for the action, not for the update after it
            if not np.isfinite(episode[-1]).all():
                fail(f"the actor has diverged at step {step - 1}; try a lower --learning-rate")
            next_observation, reward, terminal, truncation, _ = env.step(episode[-1])
            memory.add(observation, episode[-1], reward, next_observation, terminal)
            run.rewards.append(reward)
            if terminal or truncation:
                run.returns.append(sum(run.rewards))
                run.log({"charts/episodic_return": run.returns[-1], "charts/episodic_length": len(run.rewards)})
                run.rewards, episode = [], [int(rng.integers(2**31))]
                next_observation = replay_episode(env, episode)
            observation = next_observation

            # DIFFERS: no tournament before the first gradient step, when all cumulated losses are 0.
            if step % args.pruning_period == 0 and step > args.learning_starts:  # l. 13
                losses, sparsities = np.array(state.cumulated_losses), np.array(state.sparsities)
                if not np.isfinite(losses).any(axis=1).all():
                    fail(f"all networks of a critic have diverged by step {step}; try a lower --learning-rate")
                run.log({"sparsity/target": sparsities[np.arange(2), state.target_idx].mean()})
                for i in range(2):
                    run.log({f"sparsity/critic_{i}/network": sparsities[i], f"losses/critic_{i}/cumulated": losses[i]})
                parents = np.stack([select_population(rng, losses[i], args.tournament_size) for i in range(2)])  # l. 14
                state = prune_critic_copies(args, rng, state, parents, step)  # l. 15
                state = state._replace(cumulated_losses=jnp.zeros_like(state.cumulated_losses))  # l. 16
            if step % args.pruning_period == 0 and args.actor_final_sparsity:
                state = prune_actor(args, state, step)
                run.log({"sparsity/actor": sparsity_of(state.actor_masks)})

            if step % args.eval_period == 0:
                returns = evaluate_actor(eval_envs, actor, state.actor_params)
                run.log({"eval/episodic_return": returns.mean()})
                run.progress.print(f"Evaluation after {step:,} steps: {returns.mean():.1f}")
            if step % LOG_PERIOD == 0:
                run.log({"charts/SPS": run.sps(), **metrics})
            if run.saves():
                networks = {f"critic_{i}": network_at(state.params, (i, state.target_idx[i])) for i in range(2)}
                parts = {"rows": [x[: memory.n_added] for x in memory.rows], "n_added": memory.n_added}
                parts |= {"episode": episode, "metrics": jax.device_get(metrics)}
                run.save({"actor": state.actor_params, **networks}, rng, state, **parts)
    run.summarize(network_at(state.params, (jnp.arange(2), state.target_idx)))
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
