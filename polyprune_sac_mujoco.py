# /// script
# requires-python = ">=3.11"
# dependencies = ["filelock>=3.16", "flax>=0.12", "gymnasium[mujoco]>=1.2", "jax>=0.10", "mujoco>=3.1", "numpy>=2",
#     "optax>=0.2.5", "tensorboard>=2.20", "tqdm>=4.66", "tyro>=1.0"]
# ///
"""PolyPruneSAC on MuJoCo: SAC whose critics are pruned on a hand-made schedule. Also dense SAC.

The baseline of Vincent et al., "Eau De Q-Network: Adaptive Distillation of Neural Networks in Deep Reinforcement
Learning", 2025, after Obando-Ceron et al., 2024. "l. 3" is a line of the paper's Algorithm 2 that plain SAC shares.

    python polyprune_sac_mujoco.py --env-id HalfCheetah
"""

import contextlib
import dataclasses
import difflib
import functools
import json
import math
import os
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, NoReturn, get_type_hints

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends it without a traceback

import filelock
import flax.linen as nn
import gymnasium
import jax
import jax.numpy as jnp
import mujoco
import numpy as np
import optax
import tyro
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from tqdm import tqdm

LOG_PERIOD = 1_000  # steps between two points of the curves that have a value at every step
Distribution = Literal["erk", "uniform", "global"]  # of the sparsity over the tensors of a network
EVAL_SEED = 10_000  # of the first episode of every evaluation; the next ones count up


# ---- Arguments: the defaults are the paper's, where it has them ------------------------------------------------------
Whole = Annotated[int, (1, math.inf)]  # a type and its range; a bound can name another flag: (1, "total_timesteps")
Share = Annotated[float, (0, 1)]


@dataclasses.dataclass(frozen=True)
class Args:
    env_id: str = "HalfCheetah"  # the task: Ant or Ant-v5
    seed: Annotated[int, (0, 2**31 - 1)] = 1  # seed of everything that is random
    total_timesteps: Whole = 1_000_000  # steps of the run, in the environment [t_final]
    runs_dir: Path = Path("runs")  # folder in which the run gets a folder of its own
    checkpoint_period: Annotated[int, (0, math.inf)] = 50_000  # steps between two checkpoints; 0 writes none
    resume: Path | None = None  # folder of a run to go on with, under its own flags
    critic_features: Annotated[tuple[int, ...], (1, math.inf)] = (256, 256)  # widths of the hidden layers of a critic
    actor_features: Annotated[tuple[int, ...], (1, math.inf)] = (256, 256)  # widths of the hidden layers of the actor
    final_sparsity: Annotated[float, (0, 0.999)] = 0.95  # sparsity at the end of the schedule; 0 never prunes [s_F]
    actor_final_sparsity: Annotated[float, (0, 0.999)] = 0.0  # sparsity of the actor at the end of Eq. (2)
    pruning_power: Whole = 3  # steepness of the schedule, which is fastest at its start [n]
    pruning_start: Share = 0.2  # share of the run at which the schedule of Eq. (2) starts [t_start]
    pruning_end: Annotated[float, ("pruning_start", 1)] = 0.8  # share of the run at which it ends [t_end]
    pruning_period: Whole = 1_000  # steps between two prunings [P]
    sparsity_distribution: Distribution = "erk"  # erk: more of large tensors; uniform: all alike; global: one threshold
    learning_starts: Annotated[int, (1, "total_timesteps")] = 5_000  # steps played before the first gradient step
    buffer_size: Annotated[int, (2, math.inf)] = 1_000_000  # transitions in the replay memory, first in, first out [D]
    batch_size: Whole = 256  # transitions in a gradient step [B]
    gamma: Share = 0.99  # discount factor [gamma]
    tau: Share = 0.005  # weight of the newest in the moving averages: of the targets, of the cumulated losses [tau]
    learning_rate: Share = 1e-3  # step size of Adam
    adam_epsilon: Share = 1e-8  # epsilon of Adam
    utd: Whole = 1  # gradient steps of the critics in each step of the environment [UTD]
    policy_delay: Whole = 1  # steps between two gradient steps of the actor and of the temperature
    eval_period: Whole = 10_000  # steps between two evaluations
    eval_episodes: Whole = 10  # episodes of an evaluation, played side by side


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
class Transitions(NamedTuple):
    observations: np.ndarray  # (..., n_observations), all are float32
    actions: np.ndarray  # (..., n_actions), from -1 to 1
    rewards: np.ndarray  # (...)
    next_observations: np.ndarray  # (..., n_observations)
    terminals: np.ndarray  # (...), 1 at a terminal state, 0 also where the time limit cuts the episode


def check_room(args: Args, folder: Path, n_bytes: int) -> None:
    """Of a checkpoint, which is written beside the one before it."""
    needed = 2 * n_bytes - sum(path.stat().st_size for path in folder.glob("checkpoint.npz"))
    if args.checkpoint_period and needed > shutil.disk_usage(folder).free:
        fail(f"{folder} needs {needed / 1e9:,.1f} GB: lower --buffer-size, or --checkpoint-period 0 writes nothing")


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

    def saved(self) -> dict:
        return {"rows": self.rows[: self.n_added], "n_added": self.n_added}

    def load(self, rows: np.ndarray, n_added: int) -> None:
        self.rows[: len(rows)] = rows
        self.n_added = int(n_added)


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


def polynomial_sparsity(step: int, total_steps: int, final_sparsity, start, end, power) -> float:
    """Eq. (2): from 0 at `start` to `final_sparsity` at `end`, both shares of `total_steps`."""
    progress = (step - start * total_steps) / ((end - start) * total_steps or 1)
    return final_sparsity * (1 - (1 - min(max(progress, 0.0), 1.0)) ** power)


# ---- Agent state -----------------------------------------------------------------------------------------------------
class AgentState(NamedTuple):
    """All that learning changes. The two critics are the first axis of theirs."""

    actor_params: dict  # (...) [phi]
    log_temperature: jax.Array  # () [log alpha]
    actor_opt_state: optax.OptState  # of the actor and the temperature
    actor_masks: dict  # (...) bool, False where a weight is pruned
    params: dict  # (2, ...), pruned weights are exactly 0 [theta]
    target_params: dict  # (2, ...), not masked: they follow params [theta-bar]
    opt_state: optax.OptState  # (2, ...)
    masks: dict  # (2, ...) bool, False where a weight is pruned
    sparsity: jax.Array  # (), of params [s_t]


def make_optimizer(args: Args) -> optax.GradientTransformation:
    return optax.adam(args.learning_rate, eps=args.adam_epsilon)


@jax.jit
def network_at(stacked, idx):
    """What is at `idx` in all tensors of a tree: one network of a population, or several."""
    return jax.tree.map(lambda x: x[idx], stacked)


@jax.jit(static_argnums=(0, 1, 2))
def init_agent(args: Args, actor: Actor, critic: Critic, key: jax.Array, observation: np.ndarray) -> AgentState:
    actor_key, critic_key = jax.random.split(key)
    actor_params, log_temperature = actor.init(actor_key, observation), jnp.zeros(())
    init_critic = functools.partial(critic.init, observations=observation, actions=np.zeros(actor.n_actions))
    params = jax.vmap(init_critic)(jax.random.split(critic_key, 2))
    return AgentState(
        actor_params=actor_params,
        log_temperature=log_temperature,
        actor_opt_state=make_optimizer(args).init((actor_params, log_temperature)),
        actor_masks=jax.tree.map(lambda x: jnp.ones(x.shape, bool), actor_params),
        params=params,
        target_params=jax.tree.map(jnp.copy, params),
        opt_state=jax.vmap(make_optimizer(args).init)(params),
        masks=jax.tree.map(lambda x: jnp.ones(x.shape, bool), params),
        sparsity=jnp.zeros(()),
    )


# ---- Learning --------------------------------------------------------------------------------------------------------
class Draws(NamedTuple):
    """All that is random in a call of `learn`."""

    batches: Transitions  # (utd, batch, ...)
    critic_noise: np.ndarray  # (utd, batch, n_actions), standard normal
    actor_noise: np.ndarray  # (batch, n_actions)


def lower_values(actor: Actor, critic: Critic, actor_params, critic_pair, observations, noise):
    """min_i Q_i(s, a) and log pi(a | s), of an action a drawn in each state s; both (batch,)."""
    actions, log_probs = squashed_gaussian(*actor.apply(actor_params, observations), noise)
    q_values = jax.vmap(critic.apply, in_axes=(0, None, None))(critic_pair, observations, actions)  # (2, batch)
    return q_values.min(axis=0), log_probs


def learn_critics(args: Args, actor: Actor, critic: Critic, state: AgentState, batch: Transitions, noise):
    """Alg. 2, l. 6-9: one gradient step of both critics, under their masks."""
    target_pair = state.target_params  # (2, ...)
    temperature = jnp.exp(state.log_temperature)
    values, log_probs = lower_values(actor, critic, state.actor_params, target_pair, batch.next_observations, noise)
    targets = batch.rewards + args.gamma * (1 - batch.terminals) * (values - temperature * log_probs)  # l. 6

    def td_loss(params):
        q_values = critic.apply(params, batch.observations, batch.actions)  # (batch,)
        # DIFFERS: the mean over the batch; the paper's algorithms write the sum.
        return jnp.mean((targets - q_values) ** 2), jnp.mean(q_values)

    (losses, q_values), grads = jax.vmap(jax.value_and_grad(td_loss, has_aux=True))(state.params)  # l. 7-8
    updates, opt_state = jax.vmap(make_optimizer(args).update)(grads, state.opt_state)  # l. 9
    params = optax.apply_updates(state.params, updates)
    params = jax.tree.map(jnp.multiply, params, state.masks)  # what was pruned stays pruned
    target_params = optax.incremental_update(params, state.target_params, args.tau)
    state = state._replace(params=params, target_params=target_params, opt_state=opt_state)
    return state, {"losses/qf_loss": losses.mean(), "losses/qf_values": q_values.mean()}


def learn_actor(args: Args, actor: Actor, critic: Critic, state: AgentState, critic_pair, observations, noise):
    """Alg. 2, l. 12: one gradient step of the actor, and of the temperature towards an entropy of -n_actions."""
    temperature = jnp.exp(state.log_temperature)

    def actor_loss(actor_params):
        values, log_probs = lower_values(actor, critic, actor_params, critic_pair, observations, noise)
        return -jnp.mean(values - temperature * log_probs), -jnp.mean(log_probs)

    (loss, entropy), actor_grads = jax.value_and_grad(actor_loss, has_aux=True)(state.actor_params)

    def temperature_loss(log_temperature):  # see PAPER.md
        return jnp.exp(log_temperature) * (entropy + actor.n_actions)

    grads = actor_grads, jax.grad(temperature_loss)(state.log_temperature)
    updates, actor_opt_state = make_optimizer(args).update(grads, state.actor_opt_state)
    actor_params, log_temperature = optax.apply_updates((state.actor_params, state.log_temperature), updates)
    actor_params = jax.tree.map(jnp.multiply, actor_params, state.actor_masks)
    state = state._replace(actor_params=actor_params, log_temperature=log_temperature, actor_opt_state=actor_opt_state)
    return state, {"losses/actor_loss": loss, "losses/entropy": entropy, "losses/alpha": temperature}


@jax.jit(static_argnums=(0, 1, 2, 5), donate_argnums=3)
def learn(args: Args, actor: Actor, critic: Critic, state: AgentState, draws: Draws, with_actor: bool):
    """Alg. 2, l. 4-12. The actor learns from the last of the `utd` batches."""
    for i in range(args.utd):
        batch = Transitions(*(x[i] for x in draws.batches))
        state, metrics = learn_critics(args, actor, critic, state, batch, draws.critic_noise[i])
    if with_actor:
        state, more = learn_actor(args, actor, critic, state, state.params, batch.observations, draws.actor_noise)
        metrics |= more
    return state, metrics


def prune_critics(args: Args, state: AgentState, step: int) -> AgentState:
    """The masks for the sparsity of Eq. (2). The optimizers go on as they are, and the targets follow."""
    schedule = args.final_sparsity, args.pruning_start, args.pruning_end, args.pruning_power
    sparsity = polynomial_sparsity(step, args.total_timesteps, *schedule)
    masks = [magnitude_masks(network_at(state.params, i), sparsity, args.sparsity_distribution) for i in range(2)]
    masks = jax.tree.map(lambda *x: np.stack(x), *masks)
    params = jax.tree.map(jnp.multiply, state.params, masks)
    return state._replace(params=params, masks=masks, sparsity=np.float32(sparsity))


def prune_actor(args: Args, state: AgentState, step: int) -> AgentState:
    """The mask for the sparsity of Eq. (2). The optimizer goes on as it is."""
    schedule = args.actor_final_sparsity, args.pruning_start, args.pruning_end, args.pruning_power
    sparsity = polynomial_sparsity(step, args.total_timesteps, *schedule)
    masks = magnitude_masks(state.actor_params, sparsity, args.sparsity_distribution)
    return state._replace(actor_params=jax.tree.map(jnp.multiply, state.actor_params, masks), actor_masks=masks)


# ---- Acting ----------------------------------------------------------------------------------------------------------
@jax.jit(static_argnums=0)
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
    memory = TransitionMemory(min(args.buffer_size, args.total_timesteps), n_observations, n_actions)
    with contextlib.closing(Run(args, rng)) as run:
        episode = Episode(seed=rng.integers(2**31))
        saved = run.restore(state=state, memory=memory.saved(), episode=episode.saved())  # in a new run, just these
        check_room(args, run.folder, sum(x.nbytes for x in jax.tree.leaves((state, memory.rows))))
        state, metrics, episode = saved["state"], saved["metrics"], Episode(**saved["episode"])
        memory.load(**saved["memory"])
        observation = episode.start(env)
        for step in run.steps(timed_after=args.learning_starts):  # l. 2
            if step <= args.learning_starts:
                action = rng.uniform(-1, 1, n_actions).astype(np.float32)  # as the memory stores it
            else:
                action = policy_actions(actor, state.actor_params, observation, rng.standard_normal(n_actions))  # l. 3
                # DIFFERS: an update samples before the newest transition is added, as the environment runs meanwhile.
                batches = memory.sample(rng, (args.utd, args.batch_size))  # l. 5
                noise = rng.standard_normal((args.utd + 1, args.batch_size, n_actions), np.float32)
                draws = Draws(batches, noise[:-1], noise[-1])
                with_actor = step % args.policy_delay == 0
                state, new_metrics = learn(args, actor, critic, state, draws, with_actor)  # l. 4-12
                metrics |= new_metrics
            action = np.asarray(action)  # waits for the action, not for the update after it
            if not np.isfinite(action).all():
                fail(f"the actor has diverged at step {step - 1}; try a lower --learning-rate")
            next_observation, reward, terminal, truncation, _ = env.step(action)
            memory.add(observation, action, reward, next_observation, terminal)  # l. 3, too
            episode.add(action, reward)
            if terminal or truncation:
                run.log({"charts/episodic_return": episode.score, "charts/episodic_length": len(episode.actions)})
                episode = Episode(seed=rng.integers(2**31))
                next_observation = episode.start(env)  # of the next episode: nobody learns from it
            observation = next_observation

            if step % args.pruning_period == 0:
                state = prune_critics(args, state, step)
                run.log({"sparsity/target": state.sparsity})
            if step % args.pruning_period == 0 and args.actor_final_sparsity:
                state = prune_actor(args, state, step)
                run.log({"sparsity/actor": sparsity_of(state.actor_masks)})

            if step % args.eval_period == 0:
                run.log({"eval/episodic_return": evaluate_actor(eval_envs, actor, state.actor_params).mean()})
            if step % LOG_PERIOD == 0:
                run.log(metrics)
            if run.save_is_due():
                critics = {f"critic_{i}": network_at(state.params, i) for i in range(2)}
                policy = {"actor": state.actor_params, **critics}
                layers = {name: {layer: {"kind": "dense"} for layer in x["params"]} for name, x in policy.items()}
                checkpoint = {"state": state, "memory": memory.saved(), "episode": episode.saved()}
                run.save(policy, layers, checkpoint, metrics)
        if step <= args.learning_starts:
            print("The policy is an untrained network: there was no gradient step")
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
