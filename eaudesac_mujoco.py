# /// script
# requires-python = ">=3.11"
# dependencies = ["filelock>=3.16", "flax>=0.12", "gymnasium[mujoco]>=1.2", "jax>=0.10", "mujoco>=3.1", "numpy>=2",
#     "optax>=0.2.5", "tensorboard>=2.20", "tyro>=1.0"]
# ///
"""EauDeSAC on MuJoCo: two populations of critics of growing sparsity, and in each the best gives the shared target.

Algorithm 2 of Vincent et al., "Eau De Q-Network: Adaptive Distillation of Neural Networks in Deep Reinforcement
Learning", 2025, on top of Soft Actor-Critic (Haarnoja et al., 2018) as in SBX.

    python eaudesac_mujoco.py --env-id HalfCheetah
"""

import contextlib
import dataclasses
import datetime
import difflib
import functools
import json
import math
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn

import filelock
import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import optax
import tyro
from tensorboard.summary import Writer

LOG_PERIOD = 1_000  # steps between two points of the curves that have a value at every step
SHOWN = {"return": "charts/episodic_return", "evaluation": "eval/episodic_return", "sparsity": "sparsity/target"}
Distribution = Literal["uniform", "erk", "global"]  # of the sparsity over the tensors of a network
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
    sparsity_distribution: Distribution = "uniform"  # same in all tensors, Erdos-Renyi-Kernel, or one threshold for all
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


SMALLEST = {"seed": 0, "checkpoint_period": 0, "horizon": 2, "buffer_size": 2}  # all other whole numbers: 1
LARGEST = {"seed": 2**31 - 1, "horizon": 2**29 - 1, "max_noise": 1e9, "cql_alpha": 1e9}  # all other fractions: 1
NOT_SMALLER = {"n_networks": "tournament_size", "pruning_end": "pruning_start", "total_timesteps": "learning_starts"}


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
    """One spelling for all: `Ant-v5` for `ant`, `Ant` and `ant-v5`. Older versions need older packages."""
    specs = [spec for spec in gymnasium.registry.values() if "mujoco" in str(spec.entry_point) and spec.version >= 5]
    known = {name.lower(): spec.id for spec in specs for name in (spec.name, spec.id)}
    if env_id.lower() not in known:
        closest = difflib.get_close_matches(env_id, [spec.name for spec in specs], n=3, cutoff=0)
        fail(f"unknown MuJoCo task {env_id!r}; the closest names are {', '.join(closest)}")
    return known[env_id.lower()]


def make_env(env_id: str) -> gymnasium.Env:
    """The task with its own time limit, 1,000 steps in those of the paper [H], and actions scaled to [-1, 1]."""
    mujoco.set_mju_user_warning(lambda message: None)  # of model files, which are Gymnasium's and not the user's
    env = gymnasium.make(canonical_name(env_id), disable_env_checker=True)
    mujoco.set_mju_user_warning(None)
    return gymnasium.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))  # plain floats draw a warning


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
        columns = [(name, np.float32, shape) for name, shape in zip(Transitions._fields, shapes)]
        self.rows, self.n_added = np.zeros(size, columns), 0

    def add(self, *transition) -> None:
        self.rows[self.n_added % len(self.rows)] = transition
        self.n_added += 1

    def sample(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Transitions:
        rows = self.rows[rng.integers(min(self.n_added, len(self.rows)), size=shape)]
        return Transitions(*(rows[name] for name in Transitions._fields))


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
        return mean, jnp.clip(log_std, -20, 2)


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


def polynomial_sparsity(step: int, total_steps: int, final_sparsity, start, end, power) -> float:
    """Eq. (2): from 0 at `start` to `final_sparsity` at `end`, both shares of `total_steps`."""
    progress = (step - start * total_steps) / ((end - start) * total_steps or 1)
    return final_sparsity * (1 - (1 - min(max(progress, 0.0), 1.0)) ** power)


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


def put_network(stacked, idx, network) -> None:
    """Writes a network to `idx` in all tensors of a tree, which are of numpy."""
    for tensor, value in zip(jax.tree.leaves(stacked), jax.tree.leaves(network)):
        tensor[idx] = value


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def init_agent(args: Args, actor: Actor, critic: Critic, key: jax.Array, observation: np.ndarray) -> AgentState:
    actor_key, critic_key = jax.random.split(key)
    actor_params, log_temperature = actor.init(actor_key, observation), jnp.zeros(())
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
    actions, log_probs = squashed_gaussian(*actor.apply(state.actor_params, observations), noise)
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
    temperature = jnp.exp(state.log_temperature)
    grads = actor_grads, temperature * (entropy + actor.n_actions)  # of alpha * (entropy - target), see the README
    updates, actor_opt_state = make_optimizer(args).update(grads, state.actor_opt_state)
    actor_params, log_temperature = optax.apply_updates((state.actor_params, state.log_temperature), updates)
    actor_params = jax.tree.map(jnp.multiply, actor_params, state.actor_masks)
    state = state._replace(actor_params=actor_params, log_temperature=log_temperature, actor_opt_state=actor_opt_state)
    return state, {"losses/actor_loss": loss, "losses/entropy": entropy, "losses/alpha": temperature}


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 7), donate_argnums=3)
def learn(args: Args, actor: Actor, critic: Critic, state: AgentState, batches: Transitions, noise, delays, with_actor):
    """Alg. 2, l. 4-12. `batches` is (utd, batch, ...), `noise` (utd + 1, batch, n_actions): the last is the actor's."""
    for i in range(args.utd):
        batch = jax.tree.map(lambda x, i=i: x[i], batches)
        state, metrics = learn_critics(args, actor, critic, state, batch, noise[i])
    if with_actor:
        # `delays` (2, K) are exponential: the smallest delay * L_k is that of network k with a probability ~ 1 / L_k.
        behaviour_idx = (delays * state.cumulated_losses).argmin(axis=1)  # (2,) l. 11
        critic_pair = network_at(state.params, (jnp.arange(2), behaviour_idx))  # (2, ...)
        state, actor_metrics = learn_actor(args, actor, critic, state, critic_pair, batch.observations, noise[-1])
        metrics |= actor_metrics
    return state, metrics


def prune_critic_copies(args: Args, rng: np.random.Generator, state: AgentState, parents: np.ndarray, step: int):
    """Alg. 2, l. 15: the duplicated networks are pruned to a sparsity drawn by Eq. (3), all others stay as they are."""
    state, next_step = jax.tree.map(np.array, state), step + args.pruning_period  # of numpy, to write to
    for i, k in np.argwhere(parents != np.arange(args.n_networks)):
        parent = i, parents[i, k]
        noise, parent_sparsity = rng.uniform(0, args.max_noise), float(state.sparsities[parent])
        sparsity = next_sparsity(parent_sparsity, noise, step, next_step, args.total_timesteps, args.max_speed)
        params = network_at(state.params, parent)
        masks = magnitude_masks(params, sparsity, args.sparsity_distribution)
        params = jax.tree.map(np.multiply, params, masks)
        put_network(state.params, (i, k), params)
        put_network(state.target_params, (i, k), network_at(state.target_params, parent))  # not masked: it follows
        put_network(state.opt_state, (i, k), make_optimizer(args).init(params))  # copies start a new Adam
        put_network(state.masks, (i, k), masks)
        state.sparsities[i, k] = sparsity
    return jax.device_put(state)


def prune_actor(args: Args, state: AgentState, step: int) -> AgentState:
    """The mask for the sparsity of Eq. (2). The optimizer goes on as it is."""
    schedule = args.actor_final_sparsity, args.pruning_start, args.pruning_end, args.pruning_power
    sparsity = polynomial_sparsity(step, args.total_timesteps, *schedule)
    masks = magnitude_masks(state.actor_params, sparsity, args.sparsity_distribution)
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


# ---- Training --------------------------------------------------------------------------------------------------------
def train(args: Args) -> Path:
    args = load_args(args) if args.resume else args
    check_args(args)
    args = dataclasses.replace(args, env_id=canonical_name(args.env_id))
    rng = np.random.default_rng(args.seed)
    env, *eval_envs = [make_env(args.env_id) for _ in range(1 + args.eval_episodes)]
    (n_observations,), (n_actions,) = env.observation_space.shape, env.action_space.shape
    actor, critic = Actor(args.actor_features, n_actions), Critic(args.critic_features)
    state = init_agent(args, actor, critic, jax.random.key(args.seed), np.zeros(n_observations))  # Alg. 2, l. 1
    memory = TransitionMemory(args.buffer_size, n_observations, n_actions)
    with contextlib.closing(Run(args)) as run:
        seed, played, score, metrics = int(rng.integers(2**31)), [], 0.0, {}  # of the episode: seed, actions, return
        if args.resume:
            (state, rows, played), (seed, score, metrics, memory.n_added) = run.restore(rng, (state, 0, 0))
            state, memory.rows[: len(rows)], played = jax.device_put(state), rows, list(played)
        observation, _ = env.reset(seed=seed)
        for action in played:  # the same seed and actions lead to the same observation each time
            observation = env.step(action)[0]
        for step in run.steps(args.learning_starts):  # l. 2
            if step <= args.learning_starts:
                action = rng.uniform(-1, 1, n_actions).astype(np.float32)  # as the memory stores it
            else:
                action = policy_actions(actor, state.actor_params, observation, rng.standard_normal(n_actions))  # l. 3
                # DIFFERS: an update samples before the newest transition is added, as the environment runs meanwhile.
                batches = memory.sample(rng, (args.utd, args.batch_size))  # l. 5
                noise = rng.standard_normal((args.utd + 1, args.batch_size, n_actions), np.float32)
                delays = rng.standard_exponential((2, args.n_networks))
                with_actor = step % args.policy_delay == 0
                state, new_metrics = learn(args, actor, critic, state, batches, noise, delays, with_actor)  # l. 4-12
                metrics |= new_metrics
            action = np.asarray(action)  # waits for the action, not for the update after it
            if not np.isfinite(action).all():
                fail(f"the actor has diverged at step {step - 1}; try a lower --learning-rate")
            next_observation, reward, terminal, truncation, _ = env.step(action)
            memory.add(observation, action, reward, next_observation, terminal)
            played.append(action)
            score += reward
            if terminal or truncation:
                run.log({"charts/episodic_return": score, "charts/episodic_length": len(played)})
                seed, played, score = int(rng.integers(2**31)), [], 0.0
                next_observation, _ = env.reset(seed=seed)
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
                run.log({"eval/episodic_return": evaluate_actor(eval_envs, actor, state.actor_params).mean()})
            if step % LOG_PERIOD == 0:
                run.log(metrics)
            if run.save_is_due():
                critics = {f"critic_{i}": network_at(state.params, (i, state.target_idx[i])) for i in range(2)}
                tree = state, memory.rows[: memory.n_added], np.array(played)
                run.save({"actor": state.actor_params, **critics}, rng, tree, (seed, score, metrics, memory.n_added))
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
