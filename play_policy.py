# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py>=0.12", "gymnasium[mujoco]>=1.2", "imageio>=2.34", "minatar>=1.0.15", "numpy>=2",
#     "scipy>=1.14", "tyro>=1.0"]
# ///
"""Plays what any of the scripts has trained, without JAX, and says what its sparsity has bought.

    python play_policy.py runs/...
    python play_policy.py runs/... --video game.gif

To run a network elsewhere copy the sections "Policy file" and "Forward pass", with `fail` and the imports and constants
they use: NumPy, and SciPy if it is sparse. Outputs agree with JAX's to 1e-5, enough for a chaotic task to take another
course.
"""

import dataclasses
import gzip
import io
import itertools
import json
import os
import re
import shlex
import signal
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple, NoReturn

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports below ends it without a traceback
os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported: on a busy machine its threads wait for each other

import gymnasium
import numpy as np
import tyro

FRAME, STACK = (84, 84), 4  # pixels of a frame, frames of an observation
GRID = 10  # cells of a side of MinAtar's world
SPARSE_FROM = 0.85  # sparsity from which a sparse product is faster, in a convolution or in a large matrix
SPARSE_SIZE = 100_000  # weights of a large matrix
N_TIMED = 100  # observations on which an action is timed
TOOL = "this player"  # in messages
# Of MinAtar's channels in a film, after the black background: colour-blind people can tell all of them apart.
COLOURS = bytes.fromhex("000000 56b4e9 f0e442 7f7f7f d55e00 19fde4 3f6be1 e0ff9d 913728 81408a 8db577")


# ---- Arguments -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Args:
    path: tyro.conf.Positional[Path]  # the folder of a run, or its policy.npz
    episodes: int = 10  # episodes to play
    epsilon: float = 0.01  # share of random actions on Atari and MinAtar; on MuJoCo a policy plays its mean
    seed: int = 1  # seed of everything that is random
    horizon: int | None = None  # steps after which an episode is cut; without it, as in training
    video: Path | None = None  # film of the first episode, a .gif file
    record_dir: Path | None = None  # folder for a recording of all that is played on Atari, for the offline scripts
    record_rows: int = 50_000  # rows of a recorded file, each a frame with its action, reward and terminal


LIMITS = {"episodes": (1, 10**6), "epsilon": (0, 1), "seed": (0, 2**31 - 1), "horizon": (1, 10**8)}
LIMITS["record_rows"] = STACK + 1, 10**6  # fewer rows hold no transition


def fail(message: str) -> NoReturn:
    """A mistake of the person at the keyboard: one message, exit code 2, no traceback."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def check_args(args: Args) -> None:
    for name, (smallest, largest) in LIMITS.items():
        value = getattr(args, name)
        if value is not None and not smallest <= value <= largest:
            fail(f"--{name.replace('_', '-')} must be from {smallest} to {largest}, not {value}")
    if args.video and args.video.suffix != ".gif":
        fail(f"--video {args.video} must be a .gif file")
    if args.video:
        check_output(args.video)


def check_folder(folder: Path) -> None:
    """Better now than after the work."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror}")


def check_output(path: Path) -> None:
    check_folder(path.parent)
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        fail(f"{path} is a folder or a device")


def write_whole(path: Path, content: bytes) -> None:
    """There as a whole or not at all."""
    target = path.resolve()  # behind a link
    temporary = target.with_name(f".{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(target)
    except OSError as error:  # a full disk
        fail(f"cannot write {path}: {error.strerror}")
    finally:
        temporary.unlink(missing_ok=True)


# ---- Policy file -----------------------------------------------------------------------------------------------------
def load_policy(path: Path | str) -> tuple[dict, dict]:
    """What the file says about itself, and its networks: `target`, or on MuJoCo `actor` and two critics.

    Tensors have their names of flax: `networks["target"]["params"]["Conv_0"]["kernel"]`. Beside them are `layers`, the
    kind of each, and `world`: atari, minatar or mujoco.
    """
    path = Path(path) / "policy.npz" if Path(path).is_dir() else Path(path)
    if not path.exists():
        fail(f"there is no {path}: give a policy.npz, or the folder of a run")
    data = path.read_bytes()
    try:
        zipped = zipfile.ZipFile(io.BytesIO(data))
        members, n_members = zipped.infolist(), int.from_bytes(data[-12:-10], "little")
        if len(members) != n_members:  # a flipped bit in the directory can hide members, of which zipfile says nothing
            raise ValueError
        # Each is read to its end, for its checksum. Not by name: a flipped bit makes a second Conv_1 out of Conv_0.
        arrays = {x.filename.removesuffix(".npy"): np.load(io.BytesIO(zipped.read(x))) for x in members}
        about, networks = json.loads(str(arrays.pop("about"))), {}
        for name, x in arrays.items():
            network, params, rest = name.split("/", 2)
            layer, _, tensor = rest.rpartition("/")  # a layer within another one has a name such as Block_0/Conv_0
            networks.setdefault(network, {}).setdefault(params, {}).setdefault(layer, {})[tensor] = x
        kinds = about.get("layers", {})
        for name, network in networks.items():
            layers = {layer: dict(kind) for layer, kind in kinds.get(name, {}).items()}
            network |= {"layers": layers, "world": about["script"].rpartition("_")[2]}
        playing = networks["target" if "target" in networks else "actor"]
        if not isinstance(about["args"], dict) or not isinstance(about["step"], int) or "params" not in playing:
            raise ValueError
    except Exception:  # there are a dozen kinds
        fail(f"{path} is damaged, or it is not the policy.npz of a run")
    if "env_id" not in about["args"]:
        fail(f"{path} does not say its env_id")
    check_network(path, playing)
    return about, networks


def layer_names(layers: dict) -> list[str]:
    """In the order of the network: Dense_2 comes before Dense_10, which JAX sorts as text."""
    stems = {name: name.rstrip("0123456789") for name in layers}
    order = list(stems.values())
    return sorted(layers, key=lambda name: (order.index(stems[name]), len(name), name))


def check_network(path: Path, network: dict) -> None:
    """Follows the sizes through the layers of a network: what is not known here, or does not fit, gets its own line."""
    layers, params, world = network["layers"], network["params"], network["world"]
    if world not in ("atari", "minatar", "mujoco"):
        fail(f"{TOOL} does not know the world {world} of {path}")
    if not layers:
        fail(f"{path} does not say what its layers are: its script is older, or its network has no `layers`")
    for name in [*params, *layers]:
        if layers.get(name, {}).get("kind") not in ("convolution", "dense"):
            fail(f"{TOOL} does not know layer {name}")
    n_pixels = {"atari": FRAME[0], "minatar": GRID, "mujoco": 0}[world]  # of a side of what comes into a layer
    n_inputs = STACK if world == "atari" else None  # what comes into a layer; of a convolution its channels
    names = layer_names(layers)
    if world == "mujoco" and len(names) < 2:
        fail(f"{path} has an actor of one layer: it has two at least, for the mean and for the standard deviation")
    for name in names if world != "mujoco" else names[:-1]:
        layer, tensors = layers[name], params.get(name, {})
        if tensors.keys() != {"kernel", "bias"}:
            fail(f"layer {name} of {path} has {', '.join(tensors) or 'no weights'}, not a kernel and a bias")
        for x in tensors.values():
            with np.errstate(over="ignore"):
                if x.dtype.kind != "f" or not np.isfinite(x.astype(np.float32)).all():
                    fail(f"layer {name} of {path} has {x.dtype} weights that are not finite floats")
        shape, convolution = tensors["kernel"].shape, layer["kind"] == "convolution"
        fits = len(shape) == (4 if convolution else 2) and 0 not in shape and tensors["bias"].shape == shape[-1:]
        if fits and convolution:
            size, stride, padding = shape[0], layer.get("stride"), layer.get("padding")
            if padding not in ("SAME", "VALID") or type(stride) is not int or stride < 1:
                fail(f"{TOOL} does not know stride {stride} with padding {padding} of layer {name}")
            fits = size == shape[1] and n_inputs in (shape[2], None) and n_pixels >= size
            n_pixels = count_outputs(n_pixels, size, stride, padding)
        elif fits:
            n_inputs = n_pixels**2 * n_inputs if n_pixels and n_inputs else n_inputs
            n_pixels = 0
            fits = n_inputs in (shape[0], None) and (world == "mujoco" or name != names[0])
        if not fits:
            fail(f"layer {name} of {path} has a kernel of shape {shape}, which does not fit here")
        n_inputs = shape[-1]
    if n_pixels:
        fail(f"{path} ends with {names[-1]}, a convolution: {TOOL} does not know what comes out")


# ---- Forward pass: the batch is the last axis ------------------------------------------------------------------------
class Layer(NamedTuple):
    kernel: np.ndarray  # (n_outputs, n_inputs), or SciPy's sparse array of that shape
    bias: np.ndarray  # (n_outputs, 1)
    size: int = 0  # of the kernel of a convolution, in pixels
    stride: int = 0  # 0 if it is no convolution
    padding: str = ""  # SAME or VALID
    channels_last: bool = False  # in what comes in: MinAtar's observations


def count_outputs(n_pixels: int, size: int, stride: int, padding: str) -> int:
    """Per side of the image that comes out of a convolution."""
    return -(-n_pixels // stride) if padding == "SAME" else (n_pixels - size) // stride + 1


def drop_idle_units(params: dict, names: list[str]) -> dict:
    """Without hidden units that have no weight to the next layer: nobody sees them. Pruning leaves many before a narrow
    output: with 6 actions, a unit whose weights are pruned at random to 95 % is idle with p = 0.95**6 = 0.74."""
    params = dict(params)
    dense = [name for name in names if params[name]["kernel"].ndim == 2]
    for next_name, name in itertools.pairwise(dense[::-1]):  # from the output on, as idle units make others idle
        layer, next_layer = params[name], params[next_name]
        used = next_layer["kernel"].any(axis=1)
        params[name] = {"kernel": layer["kernel"][:, used], "bias": layer["bias"][used]}
        params[next_name] = next_layer | {"kernel": next_layer["kernel"][used]}
    return params


def make_layers(network: dict, sparse: bool = True) -> list[Layer]:
    """Each layer as a matrix, a sparse one where that is faster, or all as they were before they were pruned."""
    params, layers, names = network["params"], [], layer_names(network["layers"])
    if network["world"] == "mujoco":
        names.pop()  # an actor ends with two heads: the mean, and the logarithm of the standard deviation
    params = drop_idle_units(params, names) if sparse else params
    for name in names:
        kernel, bias = (params[name][x].astype(np.float32) for x in ("kernel", "bias"))
        kind, n_outputs, convolution = network["layers"][name], len(bias), kernel.ndim == 4
        geometry = (len(kernel), kind["stride"], kind["padding"]) if convolution else ()
        if convolution:  # (size, size, n_inputs, n_outputs), filled up to whole blocks, in the order of `patches`
            size, stride, _ = geometry
            n_blocks = -(-size // stride)
            kernel = np.pad(kernel, [(0, n_blocks * stride - size)] * 2 + [(0, 0)] * 2)
            blocks = kernel.reshape(n_blocks, stride, n_blocks, stride, -1, n_outputs)
            kernel = blocks.transpose(0, 2, 1, 3, 4, 5).reshape(-1, n_outputs)
            if network["world"] == "atari" and not layers:
                kernel = kernel / np.float32(255)  # pixels come as 0 to 255
        elif layers and layers[-1].stride:  # flax has the channels last in its input, here they are first
            n_inputs, n_channels = len(kernel), len(layers[-1].bias)  # said, as a size of 0 cannot be found with -1
            kernel = kernel.reshape(n_inputs // n_channels, n_channels, n_outputs).swapaxes(0, 1)
            kernel = kernel.reshape(n_inputs, n_outputs)
        if sparse and (convolution or kernel.size >= SPARSE_SIZE) and np.mean(kernel == 0) >= SPARSE_FROM:
            import scipy.sparse  # takes 0.1 s, so only if it is needed

            kernel = scipy.sparse.csr_array(kernel).T  # in CSC, the fastest for a matrix times a vector
        else:
            kernel = np.ascontiguousarray(kernel.T)
        channels_last = network["world"] == "minatar" and not layers
        layers.append(Layer(kernel, bias[:, None], *geometry, channels_last=channels_last))
    return layers


def patches(x: np.ndarray, layer: Layer, n_outputs: int) -> np.ndarray:
    """What the kernel of a convolution is multiplied with, from an image (n_channels, n_pixels, n_pixels, batch).

    The image is padded and cut into blocks of stride x stride pixels, which become channels. Each row of the result is
    then one piece of the image, copied at once. The price: for each row of outputs it has n_blocks - 1 too many.
    """
    (n_channels, n_pixels, _, batch), size, stride = x.shape, layer.size, layer.stride
    n_blocks = -(-size // stride)
    width = n_outputs + n_blocks - 1  # of the padded image in blocks; its height is one more, for the columns too many
    missing = max((n_outputs - 1) * stride + size - n_pixels, 0)  # 0 if the padding is VALID
    start, end = missing // 2, min(missing // 2 + n_pixels, width * stride)
    padded = np.zeros((n_channels, (width + 1) * stride, width * stride, batch), np.float32)
    padded[:, start:end, start:end] = x[:, : end - start, : end - start]
    blocks = padded.reshape(n_channels, width + 1, stride, width, stride, batch).transpose(2, 4, 0, 1, 3, 5)
    rows = blocks.reshape(stride * stride * n_channels, -1)
    starts = [(i * width + j) * batch for i in range(n_blocks) for j in range(n_blocks)]
    return np.concatenate([rows[:, i : i + n_outputs * width * batch] for i in starts])


def forward(layers: list[Layer], observations: np.ndarray) -> np.ndarray:
    """Of all kinds of networks."""
    batch, x = len(observations), np.moveaxis(observations, 0, -1)
    for i, layer in enumerate(layers):
        if layer.stride:
            x = np.moveaxis(x, 2, 0) if layer.channels_last else x
            n_outputs = count_outputs(x.shape[1], layer.size, layer.stride, layer.padding)
            x = layer.kernel @ patches(x, layer, n_outputs)
        else:
            x = layer.kernel @ x.reshape(-1, batch).astype(np.float32, copy=False)
        x += layer.bias
        if i < len(layers) - 1:
            np.maximum(x, 0, out=x)
        if layer.stride:
            x = x.reshape(len(x), n_outputs, -1, batch)[:, :, :n_outputs]
    return x.T  # (batch, n_outputs)


def q_values(network: dict | list[Layer], observations: np.ndarray) -> np.ndarray:
    """Observations of a batch as the environment gives them, to (batch, n_actions): (batch, STACK, 84, 84) on Atari,
    (batch, 10, 10, n_channels) on MinAtar. For many calls give it `make_layers(network)`, made once."""
    return forward(network if isinstance(network, list) else make_layers(network), observations)


def actor_mean(network: dict | list[Layer], observations: np.ndarray) -> np.ndarray:
    """(batch, n_observations) to (batch, n_actions), in the same way. The action is its tanh, from -1 to 1."""
    return forward(network if isinstance(network, list) else make_layers(network), observations)


# ---- Environment -----------------------------------------------------------------------------------------------------
def make_atari_env(env_id: str, horizon: int, colour: bool = False):
    """The protocol of training; or the same game as a person sees it."""
    import ale_py

    return ale_py.AtariVectorEnv(
        gymnasium.spec(f"ALE/{env_id}-v5").kwargs["game"],
        num_envs=1,
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
        reward_clipping=False,  # only the recorder clips; returns are the game's score
        use_fire_reset=False,
    )


def make_mujoco_env(env_id: str, horizon: int | None, colour: bool = False) -> gymnasium.Env:
    """As in training, with actions scaled to [-1, 1]; or one that can be filmed."""
    if colour and sys.platform == "linux" and "DISPLAY" not in os.environ:  # a server: draw without a screen
        os.environ.setdefault("MUJOCO_GL", "egl")
    import mujoco

    mujoco.set_mju_user_warning(lambda message: None)  # of model files, which are Gymnasium's and not the user's
    render_mode = "rgb_array" if colour else None
    env = gymnasium.make(env_id, max_episode_steps=horizon, disable_env_checker=True, render_mode=render_mode)
    mujoco.set_mju_user_warning(None)
    return gymnasium.wrappers.RescaleAction(env, np.float32(-1), np.float32(1))  # plain floats draw a warning


class GridGame:
    """A game of MinAtar by the protocol of training, in a batch of one as Atari's."""

    def __init__(self, env_id: str, horizon: int):
        import minatar  # not above: it loads matplotlib and seaborn, which takes two seconds

        name = re.sub("(?<=[a-z])(?=[A-Z])", "_", env_id).lower()  # SpaceInvaders is its space_invaders
        self.game = minatar.Environment(name, sticky_action_prob=0.1, difficulty_ramping=True)
        self.action_set, self.horizon = self.game.minimal_action_set(), horizon

    def reset(self, seed: int) -> tuple[np.ndarray, dict]:
        self.game.seed(seed)
        self.game.reset()
        self.game.last_action, self.n_steps = 0, 0  # the package leaves that of the episode before, which could stick
        return self.game.state().astype(np.uint8)[None], {}

    def step(self, actions: np.ndarray) -> tuple:
        reward, terminal = self.game.act(self.action_set[actions[0]])
        self.n_steps += 1
        truncation = self.n_steps >= self.horizon and not terminal
        return self.game.state().astype(np.uint8)[None], np.array([reward]), [terminal], [truncation], {}

    def render(self) -> np.ndarray:
        """Cells as squares of 20 pixels. Where channels meet the first one shows, in most games the player."""
        state = self.game.state()
        channels = np.where(state.any(axis=2), 1 + state.argmax(axis=2), 0)
        return np.frombuffer(COLOURS, np.uint8).reshape(-1, 3)[np.kron(channels, np.ones((20, 20), int))]


def make_env(args: Args, about: dict, network: dict, colour: bool = False):
    env_id, world = about["args"]["env_id"], network["world"]
    said = about["args"].get("horizon")
    horizon = args.horizon or (said if type(said) is int and said > 0 else None)
    if not horizon and world != "mujoco":
        fail(f"{args.path} does not say its horizon: give --horizon")
    try:
        if world == "atari":
            return make_atari_env(env_id, horizon, colour)
        if world == "minatar":
            return GridGame(env_id, horizon)
        env = make_mujoco_env(env_id, horizon, colour)
        if colour:
            env.reset()
            env.render()
        return env
    except Exception as error:  # a game or a package is not installed, or one of many drivers cannot draw
        reason = str(error).partition("\n")[0] or type(error).__name__
        fail(f"{env_id} cannot be {'filmed' if colour else 'played'} here: {reason}")


def check_fit(path: Path, env, network: dict) -> None:
    """The network has the inputs (on Atari frames, on MinAtar channels) and outputs of its environment."""
    params, names, world = network["params"], layer_names(network["layers"]), network["world"]
    output = params[names[-2 if world == "mujoco" else -1]]
    found = params[names[0]]["kernel"].shape[-2], len(output["bias"])
    if world == "atari":
        expected = STACK, env.single_action_space.n
    elif world == "minatar":
        expected = env.game.n_channels, len(env.action_set)
    else:
        expected = *env.observation_space.shape, *env.action_space.shape
    if found != expected:
        fail("{} has {} inputs and {} outputs, its environment {} and {}".format(path, *found, *expected))


# ---- Recorder --------------------------------------------------------------------------------------------------------
class Recorder:
    """Writes what is played as files of the DQN Replay data set (Agarwal et al., 2020), after those that are there."""

    MEMBERS = (("observation", np.uint8), ("action", np.int32), ("reward", np.float32), ("terminal", np.uint8))

    def __init__(self, folder: Path, n_rows: int):
        self.folder, self.n_rows, self.n_files = folder, n_rows, 0
        self.rows, self.episode_starts = [], True
        folder.mkdir(parents=True, exist_ok=True)
        check_folder(folder)
        for path in folder.iterdir():
            found = re.fullmatch(r".*_ckpt\.(\d+)\.gz", path.name)
            if not found:
                fail(f"--record-dir {folder} has other files, such as {path.name}: choose another folder")
            self.n_files = max(self.n_files, int(found[1]) + 1)

    def add(self, observations, actions, rewards, terminals, truncations) -> None:
        """One step of one environment: every argument has a leading axis of 1."""
        if self.episode_starts:
            self.rows += [(np.zeros(FRAME, np.uint8), 0, 0.0, 0)] * (STACK - 1)
        self.rows.append((observations[0, -1].copy(), actions[0], np.clip(rewards[0], -1, 1), terminals[0]))
        self.episode_starts = terminals[0] or truncations[0]
        # The format has no sign for a truncation, but the last row of a file is never sampled.
        if truncations[0] or len(self.rows) >= self.n_rows:
            self.write()

    def write(self) -> None:
        if len(self.rows) > STACK:  # fewer hold no transition
            columns = {f"$store$_{name}_ckpt.{self.n_files}.gz": dtype for name, dtype in self.MEMBERS}
            try:
                for (name, dtype), values in zip(columns.items(), zip(*self.rows)):
                    with gzip.open(self.folder / name, "wb", compresslevel=1) as file:
                        np.save(file, np.array(values, dtype))
            except BaseException:  # a full disk, Ctrl-C
                for name in columns:
                    (self.folder / name).unlink(missing_ok=True)
                raise
            self.n_files += 1
        self.rows = []


# ---- Playing ---------------------------------------------------------------------------------------------------------
def play_episode(args: Args, env, layers: list[Layer], rng: np.random.Generator, seed: int, recorder: Recorder | None):
    """Its rewards, its actions, and the first N_TIMED inputs of the network."""
    observations, _ = env.reset(seed=seed)  # on MuJoCo (n_observations,), on the others a batch of one
    rewards, actions, inputs, done = [], [], [], False
    while not done:
        x = np.atleast_2d(observations)
        if observations.ndim == 1:
            action = np.tanh(actor_mean(layers, x)[0])
        elif rng.random() < args.epsilon:
            action = rng.integers(len(layers[-1].bias), size=1)
        else:
            action = q_values(layers, x).argmax(axis=1)
        next_observations, reward, terminal, truncation, _ = env.step(action)
        if recorder:
            recorder.add(observations, action, reward, terminal, truncation)
        rewards.append(np.sum(reward))
        actions.append(action)
        inputs += [x] if len(inputs) < N_TIMED else []
        observations, done = next_observations, np.any(terminal) or np.any(truncation)
    return rewards, actions, inputs


def show_progress(returns: list, n_episodes: int) -> None:
    """In a terminal it takes the place of the line before."""
    status = f"[{'#' * (20 * len(returns) // n_episodes):20}] {len(returns)}/{n_episodes} episodes"
    status += f", mean return {np.mean(returns):.1f}" if returns else ""
    if sys.stdout.isatty():
        print(f"\r{status:70}", end="" if len(returns) < n_episodes else "\n", flush=True)
    else:
        print(status, flush=True)


def write_film(path: Path, env, seed: int, actions: list) -> None:
    """The game once more: the same seed and actions lead to the same pictures."""
    import imageio.v3 as imageio

    frames, (observations, _) = [], env.reset(seed=seed)
    atari = not isinstance(env, GridGame) and observations.ndim > 1
    for action in actions:  # the last one leads to the next episode
        frames.append(observations[0, -1].copy() if atari else env.render())  # not the whole stack
        observations = env.step(action)[0]
    duration = 70  # ms, almost as in the game: 15 steps a second
    if observations.ndim == 1:  # half of MuJoCo's steps and pixels, for a small file
        frames, duration = [frame[::2, ::2] for frame in frames[::2]], 2_000 / env.metadata["render_fps"]
    write_whole(path, imageio.imwrite("<bytes>", frames, extension=".gif", duration=duration, loop=0))


# ---- Price list ------------------------------------------------------------------------------------------------------
def count_weights(network: dict) -> tuple[int, int]:
    """Weights that are not zero, and all, of those that can be pruned: not the biases."""
    kernels = [x for layer in network["params"].values() for x in layer.values() if x.ndim > 1]
    return sum(np.count_nonzero(x) for x in kernels), sum(x.size for x in kernels)


def time_actions(sparse: list[Layer], dense: list[Layer], inputs: list) -> np.ndarray:
    """Milliseconds of both. They take turns, so that a busy moment of the machine hits one as much as the other."""
    times = []
    for x in inputs:
        for layers in (sparse, dense):
            forward(layers, x)  # not timed: the caches are still full of the other's weights
            start = time.thread_time()
            forward(layers, x)
            times.append(1_000 * (time.thread_time() - start))
    return np.median(np.reshape(times, (-1, 2)), axis=0)


def compressed_bytes(params: dict) -> int:
    """Of a network in policy.npz, without the names of its tensors."""
    file = io.BytesIO()
    np.savez_compressed(file, *[x for layer in params.values() for x in layer.values()])
    return sum(member.compress_size for member in zipfile.ZipFile(file).infolist())


def fill_zeros(params: dict) -> dict:
    """What a dense network of the same shapes would be to zip: normal draws, as large as the kept weights, for zeros.

    Zip takes 7 % off any dense weights, by their exponents, so raw bytes would credit that to the sparsity. Copies of
    kept weights would be no better: zip finds what is there twice.
    """
    rng, filled = np.random.default_rng(0), {}
    for name, layer in params.items():
        kernel = layer["kernel"]
        scale = np.sqrt(np.mean(kernel[kernel != 0] ** 2)) if kernel.any() else 1
        draws = rng.normal(0, scale, kernel.shape).astype(kernel.dtype)
        filled[name] = layer | {"kernel": np.where(kernel == 0, draws, kernel)}
    return filled


def print_prices(name: str, network: dict, layers: list[Layer], inputs: list) -> None:
    """What the sparsity has bought: of the network that plays, as it is and as if it were dense."""
    n_sparse, dense = sum(not isinstance(layer.kernel, np.ndarray) for layer in layers), make_layers(network, False)
    n_idle = sum(len(x.bias) for x in dense) - sum(len(x.bias) for x in layers)
    sizes = [compressed_bytes(params) for params in (network["params"], fill_zeros(network["params"]))]
    times = time_actions(layers, dense, inputs)
    print(f"{'The ' + name:20}{'as it is':>14}{'dense':>14}")
    print("{:20}{:14,}{:14,}".format("Bytes in the file", *sizes))
    print("{:20}{:14,}{:14,}".format("Non-zero weights", *count_weights(network)))
    print("{:20}{:14.3f}{:14.3f}".format("ms per action", *times))
    print(f"Sparse products in {n_sparse} of {len(layers)} layers, {n_idle:,} idle hidden units left out")


# ---- Main ------------------------------------------------------------------------------------------------------------
def play_policy(args: Args) -> None:
    check_args(args)
    about, networks = load_policy(args.path)
    name = "target" if "target" in networks else "actor"
    network, layers = networks[name], make_layers(networks[name])
    if args.record_dir and network["world"] != "atari":
        fail("--record-dir is for Atari alone: its files hold frames of 84 x 84")
    if args.epsilon != Args.epsilon and network["world"] == "mujoco":
        fail("--epsilon is for Atari and MinAtar")
    env = make_env(args, about, network)
    check_fit(args.path, env, network)
    film_env = make_env(args, about, network, colour=True) if args.video else None
    recorder = Recorder(args.record_dir, args.record_rows) if args.record_dir else None
    counts = {key: count_weights(x) for key, x in networks.items() if "params" in x}
    sparsities = ", ".join(f"{key} {1 - n_kept / n:.3f}" for key, (n_kept, n) in counts.items() if n)
    print(f"{about['args']['env_id']}, {about['script']}.py after {about['step']:,} steps, sparsity of {sparsities}")
    rng, returns, first = np.random.default_rng(args.seed), [], None
    show_progress(returns, args.episodes)
    try:
        for _ in range(args.episodes):
            seed = int(rng.integers(2**30))
            rewards, actions, inputs = play_episode(args, env, layers, rng, seed, recorder)
            first = first or (seed, actions)
            returns.append(sum(rewards))
            show_progress(returns, args.episodes)
    finally:  # after Ctrl-C, too
        if recorder:
            recorder.write()
    mean, std = np.mean(returns), np.std(returns)
    print(f"Return {mean:.1f} +- {std:.1f}, mean and standard deviation of {len(returns)} episodes")
    print("Each:", *np.round(returns, 1))
    if recorder:
        print(f"Recorded in {shlex.quote(str(args.record_dir))}, next number {recorder.n_files}")
    if film_env:
        write_film(args.video, film_env, *first)
    print_prices(name, network, layers, inputs)


def main(args: Args) -> None:
    try:
        play_policy(args)
    except (OSError, ImportError) as error:  # a missing file, a full disk, a missing package
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    given = tyro.cli(Args, description=__doc__)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # from here on `main` has the last word
    main(given)
