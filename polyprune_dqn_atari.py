# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py>=0.12", "flax>=0.12", "gymnasium>=1.2", "imageio>=2.34", "jax>=0.10", "numpy>=2",
#     "optax>=0.2.5", "rich>=14", "tensorboard>=2.20", "tyro>=1.0"]
# ///
"""PolyPruneDQN on Atari: DQN whose network is pruned on a hand-made schedule. Also dense DQN and DistillDQN.

The rival in Vincent et al., "Eau De Q-Network: Adaptive Distillation of Neural Networks in Deep Reinforcement
Learning", 2025, after Obando-Ceron et al., 2024. "l. 4" is a line of its Algorithm 1 that DQN has too.

    python polyprune_dqn_atari.py --env-id Pong
    tensorboard --logdir runs
"""

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
    total_timesteps: int = 10_000_000  # steps of the run: in the environment online, of the gradient offline [t_final]
    runs_dir: Path = Path("runs")  # folder in which the run gets a folder of its own
    checkpoint_period: int = 250_000  # steps between two checkpoints, from which the run can go on; 0 writes none
    resume: Path | None = None  # folder of a run to go on with, under its own flags
    evaluate: Path | None = None  # policy.npz to play, instead of training
    capture_video: Path | None = None  # .gif file for the first episode of --evaluate
    horizon: int = 27_000  # steps after which an episode is cut [H]
    features: tuple[int, int, int, int] = (32, 64, 64, 512)  # channels of the 3 convolutions, width of the hidden layer
    final_sparsity: float = 0.95  # sparsity at the end of the schedule; 0 never prunes [s_F]
    pruning_power: int = 3  # steepness of the schedule, which is fastest at its start [n]
    pruning_start: float = 0.2  # share of the run at which the schedule of Eq. (2) starts [t_start]
    pruning_end: float = 0.8  # share of the run at which it ends, and the sparsity stays [t_end]
    pruning_period: int = 4_000  # steps between two prunings [P]
    sparsity_distribution: Literal["uniform", "erk"] = "uniform"  # same sparsity in all tensors, or Erdos-Renyi-Kernel
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
    eval_episodes: int = 10  # episodes of an evaluation, played side by side
    eval_epsilon: float = 0.01  # share of random actions in an evaluation
    record_dir: Path | None = None  # folder for a recording of all that is played, for the offline scripts
    record_rows: int = 50_000  # rows of a recorded file, each a frame with its action, reward and terminal


# Whole numbers are at least 1, others between 0 and 1, but for these limits. In a pair the first is not the smaller.
LIMITS = {"seed": (0, 2**31 - 1), "checkpoint_period": (0, math.inf), "horizon": (2, 2**29 - 1)}
LIMITS |= {"features": (1, math.inf), "buffer_size": (2, math.inf)}
LIMITS |= {"final_sparsity": (0, 0.9999), "record_rows": (STACK + 1, math.inf)}
PAIRS = {"pruning_end": "pruning_start", "buffer_size": "batch_size", "learning_starts": "batch_size"}
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


def replay_episode(env, episode: list) -> np.ndarray:
    """Play it once more: an episode is its seed and its actions. They lead to the same observation each time."""
    observations, _ = env.reset(seed=episode[0])
    for actions in episode[1:]:
        observations = env.step(actions)[0]
    return observations


# ---- Replay memory ---------------------------------------------------------------------------------------------------
class Batch(NamedTuple):
    frames: np.ndarray  # (batch, STACK + 1, 84, 84) uint8: [:, :-1] is the observation, [:, 1:] the next one
    actions: np.ndarray  # (batch,) int32
    rewards: np.ndarray  # (batch,) float32
    terminals: np.ndarray  # (batch,) bool


def frames_on_disk(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    """An array in a file, which outlives the process. Its room on the disk is taken at once."""
    n_bytes, n_free = math.prod(shape), shutil.disk_usage(path.parent).free
    if not path.exists() and n_bytes > n_free:
        needs = f"the replay memory needs {n_bytes / 1e9:.2f} GB in {path.parent}, {(n_bytes - n_free) / 1e9:.2f} GB"
        fail(f"{needs} are missing: lower --buffer-size or --checkpoint-period (0 keeps it in RAM)")
    with open(path, "ab") as file:
        if hasattr(os, "posix_fallocate"):  # not on macOS
            os.posix_fallocate(file.fileno(), 0, n_bytes)  # what is there already stays
    return np.memmap(path, np.uint8, "r+", shape=shape)


class ReplayMemory:
    """The last `size` transitions, first in, first out. Each frame is kept once: stacks are rebuilt when sampled."""

    def __init__(self, size: int, n_spare: int = 0, path: Path | None = None):
        """What is older than `size` stays for another `n_spare` steps, as the last checkpoint may refer to it."""
        rows = size + STACK + n_spare  # the oldest transition needs STACK - 1 frames before it, the newest one after it
        self.size, self.n_added, self.age = size, 0, 0
        shape = rows, *FRAME  # 7.06 GB for a million; the system hands out memory as it fills
        self.frames = frames_on_disk(path, shape) if path else np.zeros(shape, np.uint8)
        self.actions, self.rewards = np.zeros(rows, np.int32), np.zeros(rows, np.float32)
        self.terminals, self.truncations = np.zeros((2, rows), bool)
        self.ages = np.zeros(rows, np.int32)  # steps since the start of the episode

    def add(self, observations, actions, rewards, terminals, truncations, next_observations) -> None:
        """One step of one environment: every argument has a leading axis of 1."""
        row, next_row = self.n_added % len(self.frames), (self.n_added + 1) % len(self.frames)
        self.frames[row], self.frames[next_row] = observations[0, -1], next_observations[0, -1]
        self.actions[row], self.rewards[row] = actions[0], np.clip(rewards[0], -1, 1)
        self.terminals[row], self.truncations[row], self.ages[row] = terminals[0], truncations[0], self.age
        self.n_added += 1
        self.age = 0 if terminals[0] or truncations[0] else self.age + 1

    def sample(self, rng: np.random.Generator, batch_size: int) -> Batch:
        steps = np.zeros(0, int)
        while len(steps) < batch_size:
            drawn = rng.integers(max(0, self.n_added - self.size), self.n_added, batch_size - len(steps))
            # DIFFERS: a transition cut by the horizon is not sampled, as the reset has replaced the frame that follows.
            steps = np.append(steps, drawn[~self.truncations[drawn % len(self.frames)]])
        offsets = np.arange(1 - STACK, 2)
        rows = (steps[:, None] + offsets) % len(self.frames)  # (batch, STACK + 1)
        frames, row = self.frames[rows], steps % len(self.frames)
        frames[-offsets > self.ages[row, None]] = 0  # frames of the episode before
        return Batch(frames, self.actions[row], self.rewards[row], self.terminals[row])


REPLAY_MEMBERS = {"observation": np.uint8, "action": np.int32, "reward": np.float32, "terminal": np.uint8}


class Recorder:
    """Writes what is played as files of the DQN Replay data set (Agarwal et al., 2020)."""

    def __init__(self, folder: Path, n_rows: int, saved: dict | None = None):
        self.folder, self.n_rows, self.n_files, self.rows, self.episode_starts = folder.resolve(), n_rows, 0, [], True
        vars(self).update(saved or {})
        self.folder.mkdir(parents=True, exist_ok=True)
        if not saved and any(self.folder.iterdir()):
            fail(f"--record-dir {folder} is not empty: choose another")

    def add(self, observations, actions, rewards, terminals, truncations) -> None:
        if self.episode_starts:
            self.rows += [(np.zeros(FRAME, np.uint8), 0, 0.0, 0)] * (STACK - 1)
        self.rows.append((observations[0, -1].copy(), actions[0], np.clip(rewards[0], -1, 1), terminals[0]))
        self.episode_starts = terminals[0] or truncations[0]
        # The format has no sign for a truncation, but the last row of a file is never sampled.
        if truncations[0] or len(self.rows) >= self.n_rows:
            self.write()

    def write(self) -> None:
        for (name, dtype), values in zip(REPLAY_MEMBERS.items(), zip(*self.rows)):
            with gzip.open(self.folder / f"$store$_{name}_ckpt.{self.n_files}.gz", "wb", compresslevel=1) as file:
                np.save(file, np.array(values, dtype))
        self.n_files, self.rows = self.n_files + 1, []


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


def polynomial_sparsity(step: int, total_steps: int, final_sparsity, start, end, power) -> float:
    """Eq. (2): from 0 at `start` to `final_sparsity` at `end`, both shares of `total_steps`."""
    progress = (step - start * total_steps) / ((end - start) * total_steps or 1)
    return final_sparsity * (1 - (1 - min(max(progress, 0.0), 1.0)) ** power)


# ---- Agent state -----------------------------------------------------------------------------------------------------
class AgentState(NamedTuple):
    """All that learning changes."""

    params: dict  # (...), pruned weights are exactly 0 [theta]
    target_params: dict  # (...) [theta-bar]
    opt_state: optax.OptState  # (...)
    masks: dict  # (...) bool, False where a weight is pruned
    sparsity: float  # of params [s_t]


def make_optimizer(args: Args) -> optax.GradientTransformation:
    return optax.adam(args.learning_rate, eps=args.adam_epsilon)


@functools.partial(jax.jit, static_argnums=(0, 1))
def init_agent(args: Args, network: QNetwork, key: jax.Array) -> AgentState:
    params = network.init(key, np.zeros((1, STACK, *FRAME), np.uint8))
    return AgentState(
        params=params,
        target_params=jax.tree.map(jnp.copy, params),
        opt_state=make_optimizer(args).init(params),
        masks=jax.tree.map(lambda x: jnp.ones(x.shape, bool), params),
        sparsity=0.0,
    )


# ---- Learning --------------------------------------------------------------------------------------------------------
def td_loss(q_values: jax.Array, batch: Batch, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """`q_values` (..., batch, n_actions): of one network or of a population, each of which has its own loss."""
    q_values = q_values[..., jnp.arange(len(targets)), batch.actions]  # (..., batch)
    # DIFFERS: the mean over the batch; the paper's algorithms write the sum.
    return jnp.mean((targets - q_values) ** 2, axis=-1), jnp.mean(q_values, axis=-1)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def learn(args: Args, network: QNetwork, state: AgentState, batch: Batch) -> tuple[AgentState, dict]:
    """Alg. 1, l. 8-11 for a single network: one gradient step of DQN, under the mask."""
    next_values = network.apply(state.target_params, batch.frames[:, 1:]).max(axis=1)  # (batch,)
    targets = batch.rewards + args.gamma * (1 - batch.terminals) * next_values  # l. 8

    def loss(params):
        return td_loss(network.apply(params, batch.frames[:, :-1]), batch, targets)

    (loss, q_value), grads = jax.value_and_grad(loss, has_aux=True)(state.params)  # l. 10
    updates, opt_state = make_optimizer(args).update(grads, state.opt_state)  # l. 11
    params = optax.apply_updates(state.params, updates)
    params = jax.tree.map(jnp.multiply, params, state.masks)  # what was pruned stays pruned

    return state._replace(params=params, opt_state=opt_state), {"losses/td_loss": loss, "losses/q_values": q_value}


def prune(args: Args, state: AgentState, step: int) -> AgentState:
    """The mask for the sparsity of Eq. (2). The optimizer goes on as it is."""
    schedule = args.final_sparsity, args.pruning_start, args.pruning_end, args.pruning_power
    sparsity = polynomial_sparsity(step, args.total_timesteps, *schedule)
    masks = magnitude_masks(jax.device_get(state.params), sparsity, args.sparsity_distribution)
    return state._replace(params=jax.tree.map(jnp.multiply, state.params, masks), masks=masks, sparsity=sparsity)


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
    env = make_env(args.env_id, n_envs=1, horizon=args.horizon)
    network = QNetwork(args.features, int(env.single_action_space.n))
    state = init_agent(args, network, jax.random.key(args.seed))  # Alg. 1, l. 1
    buffer_size = min(args.buffer_size, args.total_timesteps)
    n_spare = min(args.checkpoint_period, args.total_timesteps - buffer_size)
    recorder = Recorder(args.record_dir, args.record_rows, saved.get("recorder")) if args.record_dir else None
    n_weights = sum(x.size for x in jax.tree.leaves(state.target_params))
    header = (
        f"PolyPruneDQN on {env_name(args.env_id)}, seed {args.seed}, on the {jax.default_backend().upper()}\n"
        f"1 network of {n_weights:,} parameters, features {args.features}\n"
        f"Replay memory of {buffer_size:,} transitions, {(buffer_size + n_spare) * math.prod(FRAME) / 1e9:.2f} GB "
        f"{'on the disk' if args.checkpoint_period else 'when full'}"
    )
    with contextlib.closing(Run(args, header, saved)) as run:
        memory = ReplayMemory(buffer_size, n_spare, run.folder / "replay" if args.checkpoint_period else None)
        episode, metrics = [int(rng.integers(2**30))], {}  # the seed and the actions of the current episode
        if saved:
            state = jax.tree.unflatten(jax.tree.structure(state), jax.device_put(saved.pop("state")))
            rng.bit_generator.state, episode, metrics = saved["rng"], saved["episode"], saved["metrics"]
            vars(memory).update(saved["memory"], frames=memory.frames)
        else:
            run.log({"sparsity/target": 0.0, "charts/epsilon": 1.0})
        observations = replay_episode(env, episode)  # (1, STACK, 84, 84), one environment
        for step in run.steps():  # l. 2
            epsilon = np.interp(step, (0, args.epsilon_duration), (1, args.epsilon_end))
            if rng.random() < epsilon:  # l. 4
                actions = rng.integers(network.n_actions, size=1)
            else:
                actions = np.asarray(greedy_actions(network, state.params, observations))
            # DIFFERS: an update samples before the newest transition is added, as the environment runs meanwhile.
            if step > args.learning_starts and step % args.gradient_period == 0:  # l. 6
                batch = memory.sample(rng, args.batch_size)  # l. 7
                state, metrics = learn(args, network, state, batch)  # l. 8-11, goes on while the next lines run
                run.clock = run.clock or (step, time.monotonic())  # SPS counts from the first update, which compiles
            next_observations, rewards, terminals, truncations, _ = env.step(actions)
            episode.append(actions)
            run.rewards.append(rewards[0])
            if terminals[0] or truncations[0]:
                run.returns.append(sum(run.rewards))
                run.log({"charts/episodic_return": run.returns[-1], "charts/episodic_length": len(run.rewards)})
                run.rewards, episode = [], [int(rng.integers(2**30))]
                next_observations = replay_episode(env, episode)
            memory.add(observations, actions, rewards, terminals, truncations, next_observations)  # l. 5
            if recorder:
                recorder.add(observations, actions, rewards, terminals, truncations)
            observations = next_observations
            if not np.isfinite(metrics.get("losses/td_loss", 0)):
                fail(f"the network has diverged at step {step}; try a lower --learning-rate")

            if step % args.target_period == 0:  # l. 12
                state = state._replace(target_params=jax.tree.map(jnp.copy, state.params))  # l. 13
                run.log({"sparsity/target": state.sparsity})
            if step % args.pruning_period == 0:  # after the target update: in DistillDQN the target is not yet pruned
                state = prune(args, state, step)
                run.log({"sparsity/network": state.sparsity})

            if step % LOG_PERIOD == 0:
                run.log({"charts/SPS": run.sps(), "charts/epsilon": epsilon, **metrics})
            if run.saves():
                parts = {"memory": vars(memory) | {"frames": None}, "metrics": jax.device_get(metrics)}
                parts["recorder"] = vars(recorder) if recorder else None
                run.save({"target": state.target_params}, rng, state, episode=episode, **parts)
    if recorder and len(recorder.rows) > STACK:  # fewer rows hold no transition
        recorder.write()
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
