"""How fast the scripts are on this machine, beside the time that their matrix products take alone.

    pip install -r benchmark/requirements.txt
    export GLIBC_TUNABLES=glibc.malloc.hugetlb=1              # huge pages on Linux, see the README
    python benchmark/speed.py                                 # PyTorch is timed too, if it is installed
    python benchmark/speed.py --sbx /tmp/sbx/bin/python       # and SBX's SAC, from a venv of its own
    python benchmark/speed.py --playing                       # trained policies alone, in NumPy, C and ONNX Runtime

All times are medians of repetitions in which the things to compare take turns.
"""

import contextlib
import ctypes
import dataclasses
import io
import itertools
import math
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import eaudecql_atari  # noqa: E402
import eaudedqn_atari  # noqa: E402
import eaudedqn_minatar  # noqa: E402
import eaudesac_mujoco  # noqa: E402
import polyprune_cql_atari  # noqa: E402
import polyprune_dqn_atari  # noqa: E402
import polyprune_dqn_minatar  # noqa: E402
import polyprune_sac_mujoco  # noqa: E402

try:
    import torch
except ImportError:
    torch = None

N_ACTIONS = 6  # of Pong
N_MOVES, GRID = 3, (10, 10, 4)  # of MinAtar's Breakout
N_OBSERVATIONS, N_TORQUES = 17, 6  # of HalfCheetah


@dataclasses.dataclass(frozen=True)
class Args:
    repetitions: int = 15  # of each measurement, the median of which is shown
    playing: bool = False  # only the tables of trained policies, in two minutes
    sbx: Path | None = None  # python of a venv with `pip install torch sbx-rl "gymnasium[mujoco]"`


def medians(functions: dict, repetitions: int, clock=time.perf_counter) -> dict:
    """Milliseconds of each function. They take turns, so that a busy moment of the machine hits all of them."""
    times = {name: [] for name in functions}
    for _ in range(repetitions):
        for name, function in functions.items():
            jax.block_until_ready(function())  # not timed: caches and threads are still those of the function before
            start = clock()
            jax.block_until_ready(function())
            times[name].append(1_000 * (clock() - start))
    return {name: float(np.median(x)) for name, x in times.items()}


def print_table(title: str, header: list[str], rows: list[list]) -> None:
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(x if isinstance(x, str) else f'{x:.2f}' if x < 10 else f'{x:,.0f}' for x in row)} |")
    sys.stdout.flush()


# ---- Arithmetic: the matrix products (n, rows, inner, columns) of an update, n of them at once -----------------------
def forward(n: int, layers: list[tuple]) -> list[tuple]:
    return [(n, *layer) for layer in layers]


def backward(n: int, layers: list[tuple]) -> list[tuple]:
    """Gradients of the weights, and of what comes into each layer but the first."""
    weights = [(n, inner, rows, columns) for rows, inner, columns in layers]
    return weights + [(n, rows, columns, inner) for rows, inner, columns in layers[1:]]


def q_network_products(args, n_networks: int) -> list[tuple]:
    batch, (a, b, c, hidden) = args.batch_size, args.features
    layers = [(batch * 21**2, 8 * 8 * 4, a), (batch * 11**2, 4 * 4 * a, b), (batch * 11**2, 3 * 3 * b, c)]
    layers += [(batch, 11**2 * c, hidden), (batch, hidden, N_ACTIONS)]
    return forward(1, layers) + forward(n_networks, layers) + backward(n_networks, layers)


def grid_network_products(args, n_networks: int) -> list[tuple]:
    batch, (n_channels, hidden) = args.batch_size, args.features
    layers = [(batch * 8**2, 3 * 3 * GRID[-1], n_channels)]
    layers += [(batch, 8**2 * n_channels, hidden), (batch, hidden, N_MOVES)]
    return forward(1, layers) + forward(n_networks, layers) + backward(n_networks, layers)


def sac_products(args, n_networks: int) -> list[tuple]:
    def mlp(widths):
        return [(args.batch_size, *pair) for pair in itertools.pairwise(widths)]

    actor = mlp([N_OBSERVATIONS, *args.actor_features, 2 * N_TORQUES])  # mean and log-std
    critic = mlp([N_OBSERVATIONS + N_TORQUES, *args.critic_features, 1])
    products = forward(1, actor) + forward(2, critic)  # the targets
    products += forward(2 * n_networks, critic) + backward(2 * n_networks, critic)
    products += forward(1, actor) + forward(2, critic) + backward(1, actor)  # the actor learns through two critics
    return products + [(2, rows, columns, inner) for rows, inner, columns in critic]


PRODUCTS = {"atari": q_network_products, "minatar": grid_network_products, "mujoco": sac_products}


def products_alone(products: list[tuple]):
    rng = np.random.default_rng(0)
    pairs = [[rng.random((n, i, j), np.float32) for i, j in ((a, b), (b, c))] for n, a, b, c in products]
    pairs, multiply = jax.device_put(pairs), jax.jit(lambda pairs: [x @ y for x, y in pairs])
    return lambda: multiply(pairs)


# ---- Updates ---------------------------------------------------------------------------------------------------------
def random_frames(batch_size: int):
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 256, (batch_size, 5, 84, 84), dtype=np.uint8)
    actions, rewards = rng.integers(0, N_ACTIONS, batch_size).astype(np.int32), rng.random(batch_size, np.float32)
    return eaudedqn_atari.Batch(frames, actions, rewards, np.zeros(batch_size, bool))


def random_grids(batch_size: int):
    rng = np.random.default_rng(0)
    grids = rng.integers(0, 2, (2, batch_size, *GRID), dtype=np.uint8)
    actions, rewards = rng.integers(0, N_MOVES, batch_size).astype(np.int32), rng.random(batch_size, np.float32)
    return eaudedqn_minatar.Batch(grids[0], actions, rewards, grids[1], np.zeros(batch_size, bool))


def q_update(script, args):
    if "minatar" in script.__name__:
        network, batch = script.QNetwork(args.features, N_MOVES), random_grids(args.batch_size)
        state = [script.init_agent(args, network, jax.random.key(0), batch.observations[:1])]
    else:
        network, batch = script.QNetwork(args.features, N_ACTIONS), random_frames(args.batch_size)
        state = [script.init_agent(args, network, jax.random.key(0))]
    batches = jax.tree.map(lambda x: x[None], batch)

    def update():
        if hasattr(script, "learn_many"):
            state[0], _ = script.learn_many(args, network, state[0], batches)
        else:
            state[0], _ = script.learn(args, network, state[0], batch)
        return state[0]

    return update


def sac_update(script, args):
    actor, critic = script.Actor(args.actor_features, N_TORQUES), script.Critic(args.critic_features)
    state = [script.init_agent(args, actor, critic, jax.random.key(0), np.zeros(N_OBSERVATIONS))]
    memory = script.TransitionMemory(10_000, N_OBSERVATIONS, N_TORQUES)
    for name in memory.rows.dtype.names:
        memory.rows[name] = np.random.default_rng(0).random(memory.rows[name].shape)
    memory.n_added = len(memory.rows)
    rng = np.random.default_rng(0)
    batches = memory.sample(rng, (args.utd, args.batch_size))
    noise = rng.standard_normal((args.utd + 1, args.batch_size, N_TORQUES), np.float32)
    choices = [rng.random(2, np.float32)] if script is eaudesac_mujoco else []
    draws = script.Draws(batches, noise[:-1], noise[-1], *choices)

    def update():
        state[0], _ = script.learn(args, actor, critic, state[0], draws, True)
        return state[0]

    return update


def torch_update(args):
    """The update of EauDeDQN as one would write it in PyTorch."""
    a, b, c, hidden = args.features

    class QNetwork(torch.nn.Module):
        def __init__(self):
            super().__init__()
            layers = [torch.nn.Conv2d(4, a, 8, 4), torch.nn.Conv2d(a, b, 4, 2), torch.nn.Conv2d(b, c, 3, 1)]
            self.layers = torch.nn.ModuleList(layers)
            self.hidden, self.out = torch.nn.Linear(11**2 * c, hidden), torch.nn.Linear(hidden, N_ACTIONS)

        def forward(self, observations):
            x = observations.float() / 255.0
            for layer, padding in zip(self.layers, ((2, 2, 2, 2), (1, 2, 1, 2), (1, 1, 1, 1))):
                x = torch.relu(layer(torch.nn.functional.pad(x, padding)))
            return self.out(torch.relu(self.hidden(x.flatten(1))))

    networks, target = [QNetwork() for _ in range(args.n_networks)], QNetwork()
    optimizers = [torch.optim.Adam(x.parameters(), args.learning_rate, eps=args.adam_epsilon) for x in networks]
    masks = [[torch.ones_like(x, dtype=torch.bool) for x in network.parameters()] for network in networks]
    cumulated_losses, batch = torch.zeros(args.n_networks), random_frames(args.batch_size)

    def update():
        frames, actions, rewards, terminals = map(torch.from_numpy, batch)
        with torch.no_grad():
            targets = rewards + args.gamma * ~terminals * target(frames[:, 1:]).max(1).values
        for k, (network, optimizer) in enumerate(zip(networks, optimizers)):
            q_values = network(frames[:, :-1]).gather(1, actions.long()[:, None])[:, 0]
            loss = torch.mean((targets - q_values) ** 2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for x, mask in zip(network.parameters(), masks[k]):
                    x.mul_(mask)
                cumulated_losses[k] += loss
        return cumulated_losses.numpy()

    return update


def update_rows(cases: list[tuple], repetitions: int) -> list[list]:
    """Rows of a table. A case is script, K, flags; the last is PolyPrune's."""
    functions, work = {}, {}
    for script, n_networks, flags in cases:
        world, population = script.__name__.rpartition("_")[2], "eaude" in script.__name__
        args = script.Args(**flags | (dict(n_networks=n_networks, tournament_size=1) if population else {}))
        case = script, n_networks, args.critic_features[-1] if world == "mujoco" else args.features[-1]
        products = PRODUCTS[world](args, n_networks)
        work[case] = sum(2 * math.prod(product) for product in products) / 1e9
        functions["update", case] = (sac_update if world == "mujoco" else q_update)(script, args)
        functions["alone", case] = products_alone(products)
        if torch and script is eaudedqn_atari:
            functions["torch", case] = torch_update(args)
    found, rows = medians(functions, repetitions), []
    times = {case: found["update", case] for case in work}
    first, *_, rival = work
    for case in work:
        script, n_networks, width = case
        alone, in_torch = found["alone", case], found.get(("torch", case))
        row = [f"`{script.__name__}`", f"{n_networks}", f"{width}", times[case], work[case], alone, times[case] / alone]
        row += [times[case] / times[first] if first[:2] == (script, 1) else "-"]
        row += [times[case] / times[rival], work[case] / work[rival]]
        rows.append(row + ([in_torch, times[case] / in_torch] if in_torch else ["-", "-"]))
    jax.clear_caches()
    return rows


# ---- One step --------------------------------------------------------------------------------------------------------
def step_rows(repetitions: int) -> tuple[list[list], dict]:
    dqn, sac, single = eaudedqn_atari, eaudesac_mujoco, polyprune_dqn_atari.greedy_actions
    args, rng = dqn.Args(), np.random.default_rng(0)
    env, network = dqn.make_env("Pong", 1, 27_000), dqn.QNetwork(args.features, N_ACTIONS)
    env.reset(seed=0)
    state = dqn.init_agent(args, network, jax.random.key(0))
    memory, frames = dqn.ReplayMemory(200_000), random_frames(1).frames
    memory.frames[:], memory.n_added = frames[0, 0], memory.size
    grids, game = eaudedqn_minatar, eaudedqn_minatar.MinAtarEnv("Breakout", 27_000)
    grid_args, grid_batch = grids.Args(), random_grids(1)
    grid_network = grids.QNetwork(grid_args.features, N_MOVES)
    grid_state = grids.init_agent(grid_args, grid_network, jax.random.key(0), grid_batch.observations)
    grid_memory = grids.GridMemory(100_000, GRID)
    grid_memory.n_added = grid_memory.size
    grid_single = polyprune_dqn_minatar.greedy_actions

    def play_game():
        if game.step(0)[2]:
            game.reset(seed=0)

    game.reset(seed=0)
    sac_args, cheetah = sac.Args(), sac.make_env("HalfCheetah")
    cheetah.reset(seed=0)
    actor = sac.Actor(sac_args.actor_features, N_TORQUES)
    actor_params = jax.jit(actor.init)(jax.random.key(0), np.zeros(N_OBSERVATIONS))
    transitions = sac.TransitionMemory(1_000_000, N_OBSERVATIONS, N_TORQUES)
    transitions.rows["observations"], transitions.n_added = 1, len(transitions.rows)
    functions = {
        "Pong: a step of the emulator": lambda: env.step(np.array([0])),
        "Pong: an action of one of 5 networks": lambda: dqn.behaviour_actions(network, state.params, 3, frames[:, 1:]),
        "Pong: an action of a single network": lambda: single(network, state.target_params, frames[:, 1:]),
        "Pong: a batch of 32 from the replay memory": lambda: memory.sample(rng, 32),
        "Breakout: a step of MinAtar": play_game,
        "Breakout: an action of one of 5 networks": lambda: np.asarray(
            grids.behaviour_actions(grid_network, grid_state.params, 3, grid_batch.observations)
        ),
        "Breakout: an action of a single network": lambda: np.asarray(
            grid_single(grid_network, grid_state.target_params, grid_batch.observations)
        ),
        "Breakout: a batch of 32 from the replay memory": lambda: grid_memory.sample(rng, 32),
        "HalfCheetah: a step of the simulator": lambda: cheetah.step(np.zeros(N_TORQUES)),
        "HalfCheetah: an action": lambda: sac.policy_actions(actor, actor_params, np.zeros(N_OBSERVATIONS), 0.0),
        "HalfCheetah: a batch of 256 from the replay memory": lambda: transitions.sample(rng, (1, 256)),
    }
    times = medians(functions, 20 * repetitions)
    return [[name, x] for name, x in times.items()], times


# ---- Playing ---------------------------------------------------------------------------------------------------------
def file_megabytes(params) -> float:
    file = io.BytesIO()
    np.savez_compressed(file, *(x + 0 for x in jax.tree.leaves(params)))  # -0 becomes 0, as in `Run.save`
    return len(file.getvalue()) / 1e6


def random_network(script, sparsity: float, hidden: int) -> tuple[dict, dict, object]:
    """As `load_policy` gives it: pruned by magnitude, dense, and the network in JAX."""
    if script is eaudesac_mujoco:
        network, observations, world = script.Actor((hidden, hidden), N_TORQUES), np.zeros(N_OBSERVATIONS), "mujoco"
    else:
        network, observations = script.QNetwork((32, 64, 64, hidden), N_ACTIONS), random_frames(1).frames[:, 1:]
        world = "atari"
    dense = jax.device_get(jax.jit(network.init)(jax.random.key(0), observations))
    pruned = jax.tree.map(np.multiply, dense, script.magnitude_masks(dense, sparsity, "uniform"))
    layers = getattr(network, "layers", {name: {"kind": "dense"} for name in dense["params"]})
    return *({"params": x["params"], "layers": layers, "world": world} for x in (pruned, dense)), network


def playing_rows(repetitions: int) -> list[list]:
    """An action of a policy at 95 % sparsity, in `play_policy.py` and in JAX with its weights on the device."""
    import play_policy  # not above: it holds NumPy to one thread

    rows, observations = [], random_frames(1).frames[:, 1:]
    for hidden, over_dense, over_jax in ((512, 2.5, 2.5), (2048, 3.5, 5.0)):
        pruned, dense, network = random_network(eaudedqn_atari, 0.95, hidden)
        layers = [play_policy.make_layers(pruned, sparse) for sparse in (True, False)]
        on_device, apply = jax.device_put({"params": pruned["params"]}), jax.jit(network.apply)
        functions = {
            "sparse": lambda layers=layers: play_policy.forward(layers[0], observations),
            "dense": lambda layers=layers: play_policy.forward(layers[1], observations),
            "jax": lambda apply=apply, params=on_device: np.asarray(apply(params, observations)),
        }
        times = medians(functions, 20 * repetitions)
        ratios = times["dense"] / times["sparse"], times["jax"] / times["sparse"]
        reached = "yes" if ratios[0] >= over_dense and ratios[1] >= over_jax else "no"
        sizes = file_megabytes(pruned["params"]), file_megabytes(dense["params"])
        rows.append([f"{hidden}", *sizes, *times.values(), *ratios, f"{over_dense} and {over_jax}: {reached}"])
    return rows


def compile_policy(folder: Path, network: dict, observations: np.ndarray, flags: str = "-O3 -march=native"):
    """A function that gives the outputs for all of these observations, one after the other, in C."""
    import export_policy

    layers = export_policy.planar_layers(network)
    about = {"args": {"env_id": "a benchmark"}, "script": "speed", "step": 0}
    header = export_policy.header_text(export_policy.Args(folder, c=Path("p.h")), about, network, layers)
    words, n_outputs = export_policy.words_of(layers, network["world"]), len(layers[-1].bias)
    (folder / "p.h").write_text(header)
    (folder / "p.c").write_text(
        '#include "p.h"\n'
        f"void run(const {words['type']} *x, float *y, int n) {{\n"
        f"  for (; n > 0; n--, x += {observations[0].size}, y += {n_outputs}) policy_{words['output']}(x, y);\n}}\n"
    )
    library = Path(tempfile.mkstemp(".so", dir=folder)[1])  # a name of its own: one that is loaded is not loaded again
    command = ["cc", *flags.split(), "-shared", "-fPIC", "p.c", "-o", library, "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    outputs, run = np.zeros((len(observations), n_outputs), np.float32), ctypes.CDLL(str(library)).run
    pointers = [ctypes.c_void_p(x.ctypes.data) for x in (observations, outputs)]

    def call() -> np.ndarray:
        run(*pointers, len(observations))
        return outputs

    return call


def exported_rows(repetitions: int) -> list[list]:
    """An action in C, NumPy with SciPy, dense NumPy and ONNX Runtime, of random weights pruned by magnitude.

    Dense C is the header of the same network before it was pruned, but at 2048 hidden units it would have 240 MB.
    """
    import onnxruntime

    import export_policy
    import play_policy

    options, rows = onnxruntime.SessionOptions(), []
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    for script, hidden, sparsity in (
        (eaudedqn_atari, 512, 0.95),
        (eaudedqn_atari, 2048, 0.95),
        (eaudesac_mujoco, 256, 0.9),
    ):
        atari, (network, unpruned, _) = script is eaudedqn_atari, random_network(script, sparsity, hidden)
        x = random_frames(1).frames[:, 1:].copy() if atari else np.random.default_rng(0).random((1, 17), np.float32)
        layers = [play_policy.make_layers(network, sparse) for sparse in (True, False)]
        model = export_policy.onnx_bytes(network)
        session = onnxruntime.InferenceSession(model, options)
        with tempfile.TemporaryDirectory() as folder:
            functions = {"c": compile_policy(Path(folder), network, x)}
            if hidden < 2048:
                functions["dense c"] = compile_policy(Path(folder), unpruned, x)
            functions |= {
                "scipy": lambda layers=layers, x=x: play_policy.forward(layers[0], x),
                "dense": lambda layers=layers, x=x: play_policy.forward(layers[1], x),
                "onnx": lambda session=session, x=x: session.run(None, {"observations": x})[0],
            }
            expected = functions["scipy"]() if atari else np.tanh(functions["scipy"]())
            for name in ("c", "onnx"):
                np.testing.assert_allclose(functions[name](), expected, rtol=0, atol=1e-4)
            times = medians(functions, 20 * repetitions, time.thread_time)
        ratios = [times[name] / times["c"] for name in ("scipy", "dense", "onnx")]
        goal = "1.6, -, 2" if atari else "-, 3, -"
        reached = ratios[0] >= 1.6 and ratios[2] >= 2 if atari else ratios[1] >= 3
        name = f"Atari, {hidden}, {sparsity}" if atari else f"actor, {hidden}-{hidden}, {sparsity}"
        row = [f"{times[name]:.4f}" if name in times else "-" for name in ("c", "dense c", "scipy", "dense", "onnx")]
        row += [f"{ratio:.1f}" for ratio in ratios]
        rows.append([name, *row, f"{goal}: {'yes' if reached else 'no'}"])
    return rows


def grid_rows(repetitions: int) -> list[list]:
    """The MinAtar agent of `policies/` in C, on 100 positions of its game, as it is, dense, and pruned by magnitude."""
    import microcontroller

    import play_policy

    path = ROOT / "policies/minatar_breakout.npz"
    about, networks = play_policy.load_policy(path)
    network, prune = networks["target"], microcontroller.prune
    x = microcontroller.real_positions(path, about, network, 100)
    n_kept, n_weights = play_policy.count_weights(network)
    cases = {f"{1 - n_kept / n_weights:.3f}, as trained": network, "0": prune(network, 0)}
    cases |= {f"{sparsity}": prune(network, sparsity) for sparsity in (0.3, 0.5, 0.85, 0.95)}
    compilers = "-O3 -march=native", "-O3"
    with tempfile.TemporaryDirectory() as folder:
        functions = {
            (name, flags): compile_policy(Path(folder), case, x, flags)
            for name, case in cases.items()
            for flags in compilers
        }
        for (name, _), function in functions.items():
            np.testing.assert_allclose(function(), play_policy.q_values(cases[name], x), rtol=0, atol=1e-4)
        times = medians(functions, 10 * repetitions, time.thread_time)
    rows = []
    for name in cases:
        microseconds = [1_000 * times[name, flags] / len(x) for flags in compilers]
        ratios = [times["0", flags] / times[name, flags] for flags in compilers]
        goal = ", ".join("yes" if ratio > 1 else "no" for ratio in ratios)
        goal = f"1, 1: {goal}" if name.endswith("as trained") else "-"
        rows.append([name, *(f"{x:.1f}" for x in microseconds), *(f"{x:.2f}" for x in ratios), goal])
    return rows


def on_one_core(function, repetitions: int) -> list[list]:
    """In a process of its own that has one core from its start, so that all libraries use one thread."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()  # Linux
    if cores:
        os.sched_setaffinity(0, {max(cores)})
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        future = pool.submit(function, repetitions)
        if cores:
            os.sched_setaffinity(0, cores)
        return future.result()


def print_playing(repetitions: int) -> None:
    header = [
        "hidden",
        "file, MB",
        "if dense, MB",
        "sparse, ms",
        "dense, ms",
        "JAX, ms",
        "dense / sparse",
        "JAX / sparse",
    ]
    print_table("Playing, one thread, 95 % sparse", [*header, "goal"], on_one_core(playing_rows, repetitions))
    if not shutil.which("cc"):
        print("\nno C compiler: what export_policy.py writes is not timed")
        return
    header = ["network, sparsity", "C, ms", "dense C, ms", "NumPy and SciPy, ms", "dense NumPy, ms", "ONNX Runtime, ms"]
    header += ["SciPy / C", "dense NumPy / C", "ONNX Runtime / C", "goals"]
    print_table("Exported, one thread", header, on_one_core(exported_rows, repetitions))
    header = ["sparsity", "`-O3 -march=native`, microseconds", "`-O3`, microseconds"]
    header += ["dense / sparse, `-O3 -march=native`", "dense / sparse, `-O3`", "goals"]
    print_table("Breakout's agent in C, one thread", header, on_one_core(grid_rows, repetitions))


# ---- Whole runs ------------------------------------------------------------------------------------------------------
def run_script(script, flags: str, folder: str) -> tuple[float, float, float]:
    """Seconds to the start of the run, steps per second after compilation, and peak memory in GB."""
    peak, seconds = None, 0.0
    code = f"import tyro, {script.__name__} as script; script.LOG_PERIOD = 100; script.main(tyro.cli(script.Args))"
    runs_dir = tempfile.mkdtemp(dir=folder)
    command = [sys.executable, "-c", code, *flags.split(), "--runs-dir", runs_dir]
    start = time.perf_counter()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if line.startswith("Run folder"):
                seconds = time.perf_counter() - start
            with contextlib.suppress(OSError):  # it may have ended
                peak = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text()) or peak
    if process.returncode:
        sys.exit(f"{' '.join(command)} has failed")
    (events,) = Path(runs_dir).glob("*")
    sps = EventAccumulator(str(events)).Reload().Scalars("charts/SPS")[-1].value
    return seconds, sps, int(peak[1]) / 1e6


SBX = """
import time, gymnasium, sbx, stable_baselines3.common.callbacks as callbacks
class Clock(callbacks.BaseCallback):
    def _on_step(self):
        if self.num_timesteps == 1_500:
            self.start = time.perf_counter()
        return True
clock = Clock()
settings = dict(learning_rate=1e-3, learning_starts=1_000, batch_size=256)
agent = sbx.SAC("MlpPolicy", gymnasium.make("HalfCheetah-v5"), **settings)
agent.learn(6_000, callback=clock)
print(4_500 / (time.perf_counter() - clock.start))
"""


def main(args: Args) -> None:
    if args.playing:
        print_playing(args.repetitions)
        return
    wide = dict(critic_features=(1024, 1024), actor_features=(1024, 1024))
    groups = [
        [(eaudedqn_atari, k, {}) for k in (1, 2, 5, 10)] + [(polyprune_dqn_atari, 1, {})],
        [(eaudecql_atari, 5, {}), (polyprune_cql_atari, 1, {})],
        [(eaudedqn_minatar, k, {}) for k in (1, 2, 5, 10)] + [(polyprune_dqn_minatar, 1, {})],
        [(eaudesac_mujoco, k, {}) for k in (1, 2, 5, 10)] + [(polyprune_sac_mujoco, 1, {})],
        [(eaudesac_mujoco, k, wide) for k in (1, 5)] + [(polyprune_sac_mujoco, 1, wide)],
    ]
    header = ["script", "K", "width", "update, ms", "GFLOP", "its products alone, ms", "ratio", "t(K) / t(1)"]
    header += ["time / PolyPrune's", "work / PolyPrune's", "PyTorch, ms", "ratio"]
    rows = []
    for cases in groups:
        rows += update_rows(cases, args.repetitions * (1 if cases[0][0].__name__.endswith("_atari") else 5))
    print_table("Updates", header, rows)
    step_table, steps = step_rows(args.repetitions)
    print_table("Parts of a step", ["what", "ms"], step_table)
    print_playing(args.repetitions)

    rows = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(ROOT):
        # With next to no prunings, evaluations and checkpoints, which are rare in a run of full length.
        online = "--env-id Pong --learning-starts 200 --epsilon-duration 1 --checkpoint-period 0 --total-timesteps"
        offline = f"--env-id Pong --dataset-dir {folder}/data --eval-episodes 1 --horizon 2"
        offline += " --checkpoint-period 0 --total-timesteps"
        sac = "--env-id HalfCheetah --total-timesteps 6000 --learning-starts 1000 --pruning-period 7000"
        sac += " --eval-period 7000 --checkpoint-period 0"
        dense_sac = f"{sac} --final-sparsity 0"
        one_of_5, one = steps["Pong: an action of one of 5 networks"], steps["Pong: an action of a single network"]
        learned = steps["HalfCheetah: an action"]
        grids = "--env-id Breakout --learning-starts 1000 --epsilon-duration 1 --checkpoint-period 0 --total-timesteps"
        grid_of_5, grid = [steps[f"Breakout: an action of {x}"] for x in ("one of 5 networks", "a single network")]
        runs = [  # script, flags, steps per update, milliseconds that an action takes
            (eaudedqn_atari, f"{online} 800", 4, one_of_5),
            (polyprune_dqn_atari, f"{online} 2200", 4, one),
            (eaudecql_atari, f"{offline} 300 --epoch-steps 300", 1, 0),
            (polyprune_cql_atari, f"{offline} 800 --epoch-steps 800", 1, 0),
            (eaudedqn_minatar, f"{grids} 6000 --target-period 7000", 2, grid_of_5),
            (polyprune_dqn_minatar, f"{grids} 15000 --target-period 16000 --pruning-period 16000", 2, grid),
            (eaudesac_mujoco, sac, 1, learned),
            (polyprune_sac_mujoco, dense_sac, 1, learned),
        ]
        run_script(polyprune_dqn_atari, f"{online} 400 --features 2 3 3 4", folder)
        (policy,) = Path(folder).glob("*/*/policy.npz")
        record = f"--episodes 1 --horizon 400 --record-rows 300 --record-dir {folder}/data"
        command = [sys.executable, "play_policy.py", policy, *record.split()]
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        for script, flags, period, action in runs:  # the update is timed once more, just before and just after the run
            update = {"update": (sac_update if "mujoco" in script.__name__ else q_update)(script, script.Args())}
            before = medians(update, args.repetitions)["update"]
            seconds, sps, memory = run_script(script, flags, folder)
            after = medians(update, args.repetitions)["update"]
            bound = 1_000 / ((before + after) / 2 / period + action)
            rows.append([f"`{script.__name__}`", seconds, sps, bound, sps / bound, memory])
        header = ["script", "seconds to its start", "steps per second", "update and action allow", "ratio"]
        header += ["GB beside the replay memory"]
        print_table("Whole runs", header, rows)
        if args.sbx:
            pairs = []
            for _ in range(3):
                ours = run_script(polyprune_sac_mujoco, dense_sac, folder)[1]
                result = subprocess.run(
                    [args.sbx.absolute(), "-c", SBX], cwd=folder, capture_output=True, text=True, check=True
                )
                pairs.append((ours, float(result.stdout.split()[-1])))
            ours, theirs = np.median(pairs, axis=0)
            rows = [[f"{ours:.0f}", f"{theirs:.0f}", ours / theirs]]
            print_table("Dense SAC on HalfCheetah, steps per second", ["here", "SBX", "ratio"], rows)


if __name__ == "__main__":
    print(f"jax {jax.__version__} on {jnp.zeros(1).device}, {os.cpu_count()} cores")
    main(tyro.cli(Args, description=__doc__))
