# /// script
# requires-python = ">=3.11"
# dependencies = ["ale-py>=0.12", "gymnasium[mujoco]>=1.2", "imageio>=2.34", "numpy>=2", "scipy>=1.14", "tyro>=1.0"]
# ///
"""Plays what any of the six scripts has trained, without JAX, and says what its sparsity has bought.

    python play_policy.py runs/.../policy.npz
    python play_policy.py runs/.../policy.npz --video game.gif

To run a network elsewhere, copy the sections "Policy file" and "Forward pass", with the imports and constants they use:
NumPy, and SciPy if it is sparse. Outputs agree with JAX's to 1e-5, enough for a chaotic task to take another course.
"""

import dataclasses
import gzip
import importlib.util
import io
import itertools
import json
import os
import re
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from typing import NamedTuple, NoReturn

os.environ["OPENBLAS_NUM_THREADS"] = "1"  # before NumPy is imported: on a busy machine its threads wait for each other

import gymnasium
import numpy as np
import tyro

FRAME, STACK = (84, 84), 4  # pixels of a frame, frames of an observation
STRIDES = {8: 4, 4: 2, 3: 1}  # of a convolution, by the size of its kernel
SPARSE_FROM = 0.85  # sparsity from which a sparse product is faster, in a convolution or in a large matrix
SPARSE_SIZE = 100_000  # weights of a large matrix
N_TIMED = 100  # observations on which an action is timed


# ---- Arguments -------------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True)
class Args:
    path: tyro.conf.Positional[Path]  # the policy.npz of a run
    episodes: int = 10  # episodes to play
    epsilon: float = 0.01  # share of random actions on Atari; on MuJoCo a policy plays its mean
    seed: int = 1  # seed of everything that is random
    horizon: int | None = None  # steps after which an episode is cut; without it, as in training
    video: Path | None = None  # film of the first episode, a .gif file
    record_dir: Path | None = None  # folder for a recording of all that is played on Atari, for the offline scripts
    record_rows: int = 50_000  # rows of a recorded file, each a frame with its action, reward and terminal
    onnx: Path | None = None  # file for ONNX Runtime, which knows no sparse weights: it is as large as a dense network


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
    if args.onnx and not importlib.util.find_spec("onnx"):
        fail("--onnx needs a package: pip install onnx")
    if args.video and args.video.suffix != ".gif":
        fail(f"--video {args.video} must be a .gif file")
    for path in filter(None, (args.video, args.onnx)):
        check_folder(path.parent)
        if path.is_dir():
            fail(f"{path} is a folder")


def check_folder(folder: Path) -> None:
    """Better now than after ten episodes."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        fail(f"cannot write to {folder}: {error.strerror}")


def write_whole(path: Path, write) -> None:
    """There as a whole or not at all."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


# ---- Policy file -----------------------------------------------------------------------------------------------------
def load_policy(path: Path | str) -> tuple[dict, dict]:
    """What the file says about itself, and its networks: `target` on Atari, `actor` and two critics on MuJoCo.

    Tensors have their names of flax: `networks["target"]["params"]["Conv_0"]["kernel"]`.
    """
    data = Path(path).read_bytes()
    try:
        zipped = zipfile.ZipFile(io.BytesIO(data))
        members, n_members = zipped.infolist(), int.from_bytes(data[-12:-10], "little")
        if len(members) != n_members:  # a flipped bit in the directory can hide members, of which zipfile says nothing
            raise ValueError
        # Each is read to its end, for its checksum. Not by name: a flipped bit makes a second Conv_1 out of Conv_0.
        arrays = {x.filename.removesuffix(".npy"): np.load(io.BytesIO(zipped.read(x))) for x in members}
        about, networks = json.loads(str(arrays.pop("about"))), {}
        for name, x in arrays.items():
            network, params, layer, tensor = name.split("/")
            networks.setdefault(network, {}).setdefault(params, {}).setdefault(layer, {})[tensor] = x
        if not {"script", "args", "step"} <= about.keys() or not {"target", "actor"} & networks.keys():
            raise ValueError
        return about, networks
    except Exception:  # there are a dozen kinds
        fail(f"{path} is damaged, or it is not the policy.npz of a run")


# ---- Forward pass: the batch is the last axis ------------------------------------------------------------------------
class Layer(NamedTuple):
    kernel: np.ndarray  # (n_outputs, n_inputs), or SciPy's sparse array of that shape
    bias: np.ndarray  # (n_outputs, 1)
    size: int  # of the kernel of a convolution, in pixels
    stride: int  # 0 if it is no convolution


def drop_idle_units(params: dict, names: list[str]) -> dict:
    """Without hidden units that have no weight to the next layer: nobody sees them. Pruning leaves many before a narrow
    output: with 6 actions, a unit whose weights are pruned at random to 95 % is idle with p = 0.95**6 = 0.74."""
    params = dict(params)
    dense = [name for name in names if name.startswith("Dense")]
    for next_name, name in itertools.pairwise(dense[::-1]):  # from the output on, as idle units make others idle
        layer, next_layer = params[name], params[next_name]
        used = next_layer["kernel"].any(axis=1)
        params[name] = {"kernel": layer["kernel"][:, used], "bias": layer["bias"][used]}
        params[next_name] = next_layer | {"kernel": next_layer["kernel"][used]}
    return params


def make_layers(network: dict, sparse: bool = True) -> list[Layer]:
    """Each layer as a matrix, a sparse one where that is faster, or all as they were before they were pruned."""
    params, layers = network["params"], []
    names = [f"{kind}_{i}" for kind in ("Conv", "Dense") for i in range(len(params)) if f"{kind}_{i}" in params]
    if "Conv_0" not in params:
        names.pop()  # an actor ends with two heads: the mean, and the logarithm of the standard deviation
    params = drop_idle_units(params, names) if sparse else params
    for name in names:
        kernel, bias, size, stride = params[name]["kernel"], params[name]["bias"], 0, 0
        if kernel.ndim == 4:  # (size, size, n_inputs, n_outputs), sorted into the order of `patches`
            size, stride = len(kernel), STRIDES[len(kernel)]
            blocks = kernel.reshape(size // stride, stride, size // stride, stride, -1, len(bias))
            kernel = blocks.transpose(0, 2, 1, 3, 4, 5).reshape(-1, len(bias))
            kernel = kernel / np.float32(255) if name == "Conv_0" else kernel  # pixels come as 0 to 255
        elif layers and layers[-1].stride:  # flax has the channels last in its input, here they are first
            n_channels = len(layers[-1].bias)
            kernel = kernel.reshape(-1, n_channels, len(bias)).swapaxes(0, 1).reshape(-1, len(bias))
        if sparse and (stride or kernel.size >= SPARSE_SIZE) and np.mean(kernel == 0) >= SPARSE_FROM:
            import scipy.sparse  # takes 0.1 s, so only if it is needed

            kernel = scipy.sparse.csr_array(kernel).T  # in CSC, the fastest for a matrix times a vector
        else:
            kernel = np.ascontiguousarray(kernel.T)
        layers.append(Layer(kernel, bias[:, None], size, stride))
    return layers


def patches(x: np.ndarray, size: int, stride: int) -> np.ndarray:
    """What the kernel of a convolution is multiplied with, from an image (n_channels, n_pixels, n_pixels, batch).

    The image is padded and cut into blocks of stride x stride pixels, which become channels. Each row of the result is
    then one piece of the image, copied at once. The price: for each row of outputs it has n_blocks - 1 too many.
    """
    n_channels, n_pixels, _, batch = x.shape
    n_outputs, n_blocks = -(-n_pixels // stride), size // stride
    width = n_outputs + n_blocks - 1  # of the padded image in blocks; its height is one more, for the columns too many
    start = (width * stride - n_pixels) // 2  # SAME padding
    padded = np.zeros((n_channels, (width + 1) * stride, width * stride, batch), np.float32)
    padded[:, start : start + n_pixels, start : start + n_pixels] = x
    blocks = padded.reshape(n_channels, width + 1, stride, width, stride, batch).transpose(2, 4, 0, 1, 3, 5)
    rows = blocks.reshape(stride * stride * n_channels, -1)
    starts = [(i * width + j) * batch for i in range(n_blocks) for j in range(n_blocks)]
    return np.concatenate([rows[:, i : i + n_outputs * width * batch] for i in starts])


def forward(layers: list[Layer], observations: np.ndarray) -> np.ndarray:
    """Of all kinds of networks."""
    batch, x = len(observations), np.moveaxis(observations, 0, -1)
    for i, (kernel, bias, size, stride) in enumerate(layers):
        n_outputs = -(-x.shape[1] // stride) if stride else 0  # per side of the image
        x = kernel @ (patches(x, size, stride) if stride else x.reshape(-1, batch).astype(np.float32, copy=False))
        x += bias
        if i < len(layers) - 1:
            np.maximum(x, 0, out=x)
        if stride:
            x = x.reshape(len(x), n_outputs, -1, batch)[:, :, :n_outputs]
    return x.T  # (batch, n_outputs)


def q_values(network: dict | list[Layer], observations: np.ndarray) -> np.ndarray:
    """(batch, STACK, 84, 84) uint8 to (batch, n_actions). For many calls give it `make_layers(network)`, made once."""
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


def make_env(args: Args, about: dict, colour: bool = False):
    env_id, horizon = about["args"]["env_id"], args.horizon or about["args"].get("horizon")
    try:
        if "actor_features" not in about["args"]:
            return make_atari_env(env_id, horizon, colour)
        env = make_mujoco_env(env_id, horizon, colour)
        if colour:
            env.reset()
            env.render()
        return env
    except Exception as error:  # a game or a package is not installed, or one of many drivers cannot draw
        reason = str(error).partition("\n")[0] or type(error).__name__
        fail(f"{env_id} cannot be {'filmed' if colour else 'played'} here: {reason}")


# ---- Recorder --------------------------------------------------------------------------------------------------------
class Recorder:
    """Writes what is played as files of the DQN Replay data set (Agarwal et al., 2020), after those that are there."""

    MEMBERS = (("observation", np.uint8), ("action", np.int32), ("reward", np.float32), ("terminal", np.uint8))

    def __init__(self, folder: Path, n_rows: int):
        self.folder, self.n_rows, self.n_files, self.rows, self.episode_starts = folder, n_rows, 0, [], True
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
    observations, _ = env.reset(seed=seed)  # (1, STACK, 84, 84) on Atari, (n_observations,) on MuJoCo
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
    for action in actions:  # the last one leads to the next episode
        frames.append(observations[0, -1].copy() if observations.ndim > 1 else env.render())  # not the whole stack
        observations = env.step(action)[0]
    duration = 70  # ms, almost as in the game: 15 steps a second
    if observations.ndim == 1:  # half of MuJoCo's steps and pixels, for a small file
        frames, duration = [frame[::2, ::2] for frame in frames[::2]], 2_000 / env.metadata["render_fps"]
    write_whole(path, lambda file: imageio.imwrite(file, frames, extension=".gif", duration=duration, loop=0))


# ---- Price list ------------------------------------------------------------------------------------------------------
def count_weights(network: dict) -> tuple[int, int]:
    """Weights that are not zero, and all, of those that can be pruned: not the biases."""
    kernels = [layer["kernel"] for layer in network["params"].values()]
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


def print_prices(path: Path, name: str, network: dict, layers: list[Layer], inputs: list) -> None:
    """What the sparsity has bought: of the network that plays, in the file and as if it were dense."""
    n_bytes = sum(x.compress_size for x in zipfile.ZipFile(path).infolist() if x.filename.startswith(f"{name}/"))
    n_dense_bytes = sum(x.nbytes for layer in network["params"].values() for x in layer.values())
    n_sparse, dense = sum(not isinstance(layer.kernel, np.ndarray) for layer in layers), make_layers(network, False)
    n_idle = sum(len(x.bias) for x in dense) - sum(len(x.bias) for x in layers)
    times = time_actions(layers, dense, inputs)
    print(f"{'The ' + name:20}{'as it is':>14}{'dense':>14}")
    print(f"{'Bytes in the file':20}{n_bytes:14,}{n_dense_bytes:14,}")
    print("{:20}{:14,}{:14,}".format("Non-zero weights", *count_weights(network)))
    print("{:20}{:14.3f}{:14.3f}".format("ms per action", *times))
    print(f"Sparse products in {n_sparse} of {len(layers)} layers, {n_idle:,} idle hidden units left out")


# ---- ONNX ------------------------------------------------------------------------------------------------------------
def write_onnx(path: Path, network: dict) -> None:
    """Observations as the environment gives them; out come `q_values`, or on MuJoCo `actions` from -1 to 1."""
    import onnx.checker
    from onnx import TensorProto, helper, numpy_helper

    layers, nodes, tensors = make_layers(network, sparse=False), [], []

    def add(operator: str, *weights: str, **options) -> None:
        inputs = [nodes[-1].output[0] if nodes else "observations", *weights]
        nodes.append(helper.make_node(operator, inputs, [f"x_{len(nodes)}"], **options))

    atari = layers[0].stride > 0
    add("Cast", to=TensorProto.FLOAT)
    for i, (kernel, bias, size, stride) in enumerate(layers):
        weights = f"kernel_{i}", f"bias_{i}"
        if stride:
            blocks = kernel.reshape(len(bias), size // stride, size // stride, stride, stride, -1)
            kernel = blocks.transpose(0, 5, 1, 3, 2, 4).reshape(len(bias), -1, size, size)
            add("Conv", *weights, strides=[stride, stride], auto_pad="SAME_UPPER")
        else:
            add("Flatten")
            add("Gemm", *weights, transB=1)
        tensors += [numpy_helper.from_array(x, name) for x, name in zip((kernel, bias[:, 0]), weights)]
        if i < len(layers) - 1:
            add("Relu")
    if not atari:
        add("Tanh")
    nodes[-1].output[0] = "q_values" if atari else "actions"
    shape = (STACK, *FRAME) if atari else layers[0].kernel.shape[1:]
    kind = TensorProto.UINT8 if atari else TensorProto.FLOAT
    inputs = helper.make_tensor_value_info("observations", kind, ("batch", *shape))
    outputs = helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, ("batch", len(layers[-1].bias)))
    graph = helper.make_graph(nodes, "policy", [inputs], [outputs], tensors)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)  # of 2022
    onnx.checker.check_model(model)
    write_whole(path, lambda file: file.write(model.SerializeToString()))


# ---- Main ------------------------------------------------------------------------------------------------------------
def play_policy(args: Args) -> None:
    check_args(args)
    about, networks = load_policy(args.path)
    name = "target" if "target" in networks else "actor"
    network, layers = networks[name], make_layers(networks[name])
    if name == "actor" and (args.record_dir or args.epsilon != Args.epsilon):
        fail("--record-dir and --epsilon are for Atari")
    env, film_env = make_env(args, about), make_env(args, about, colour=True) if args.video else None
    recorder = Recorder(args.record_dir, args.record_rows) if args.record_dir else None
    if args.onnx:
        write_onnx(args.onnx, network)
    counts = {key: count_weights(x) for key, x in networks.items()}
    sparsities = ", ".join(f"{key} {1 - n_kept / n_weights:.3f}" for key, (n_kept, n_weights) in counts.items())
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
        print(f"Recorded in {args.record_dir}, next number {recorder.n_files}")
    if film_env:
        write_film(args.video, film_env, *first)
    print_prices(args.path, name, network, layers, inputs)


def main(args: Args) -> None:
    try:
        play_policy(args)
    except (OSError, ImportError) as error:  # a missing file, a full disk, a missing package
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
