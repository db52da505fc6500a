"""Playing without JAX: the same numbers as flax, the same games, and nothing but one line when something is wrong."""

import dataclasses
import io
import itertools
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import ClassVar

import imageio.v3 as imageio
import jax
import numpy as np
import pytest
from catch import CatchEnv
from common import TINY, assert_trees_equal
from mujoco_probe import Probe

import eaudecql_atari
import eaudedqn_atari
import eaudedqn_minatar
import eaudesac_mujoco
import play_policy
import polyprune_cql_atari
import polyprune_dqn_atari
import polyprune_dqn_minatar
import polyprune_sac_mujoco
from play_policy import Args, actor_mean, load_policy, make_layers, q_values

ATARI = [eaudedqn_atari, eaudecql_atari, polyprune_dqn_atari, polyprune_cql_atari]
MINATAR = [eaudedqn_minatar, polyprune_dqn_minatar]
MUJOCO = [eaudesac_mujoco, polyprune_sac_mujoco]
ROOT = Path(play_policy.__file__).parent


def prune(params, sparsity):
    """Pruned, and with biases as learned ones are: not zero."""
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: x if x.ndim > 1 else rng.normal(0, 0.1, x.shape).astype(np.float32), params)
    return jax.tree.map(np.multiply, params, eaudedqn_atari.magnitude_masks(params, sparsity, "uniform"))


def network_of(params, world, layers=None):
    """As `load_policy` gives it."""
    layers = layers or {name: {"kind": "dense"} for name in params["params"]}
    return {"params": params["params"], "layers": layers, "world": world}


def q_network(sparsity, features=TINY, n_actions=6):
    """Of Atari: in flax, and as `load_policy` gives it."""
    network = eaudedqn_atari.QNetwork(features, n_actions)
    params = jax.device_get(jax.jit(network.init)(jax.random.key(0), np.zeros((1, 4, 84, 84), np.uint8)))
    return network, network_of(prune(params, sparsity), "atari", network.layers)


def grid_network(sparsity, features=(4, 8), n_channels=4, n_actions=3):
    network = eaudedqn_minatar.QNetwork(features, n_actions)
    params = jax.device_get(jax.jit(network.init)(jax.random.key(0), np.zeros((1, 10, 10, n_channels), np.uint8)))
    return network, network_of(prune(params, sparsity), "minatar", network.layers)


def actor_network(sparsity, features, n_observations=11, n_actions=3):
    network = eaudesac_mujoco.Actor(features, n_actions)
    params = jax.device_get(jax.jit(network.init)(jax.random.key(0), np.zeros(n_observations)))
    return network, network_of(prune(params, sparsity), "mujoco")


def apply(network, loaded, observations):
    return network.apply({"params": loaded["params"]}, observations)


def write_policy(path, script, networks, **flags):
    """As a script does. `networks` are as `load_policy` gives them."""
    about = {"script": script.__name__, "args": json.loads(json.dumps(vars(script.Args(**flags)), default=str))}
    about |= {"step": 70, "layers": {name: x["layers"] for name, x in networks.items()}}
    params = {name: {"params": x["params"]} for name, x in networks.items()}
    eaudedqn_atari.write_npz(path, about, params, np.savez_compressed)
    return path


def change_policy(path, change):
    """`change` gets all arrays by name and `about`, to do with them what it wants."""
    arrays = dict(np.load(path))
    about = json.loads(str(arrays.pop("about")))
    change(about, arrays)
    np.savez_compressed(path, about=json.dumps(about), **arrays)
    return path


def atari_policy(path, script=eaudedqn_atari, sparsity=0.5, features=TINY, n_actions=6, env_id="Pong", **flags):
    _, network = q_network(sparsity, features, n_actions)
    return write_policy(path, script, {"target": network}, env_id=env_id, features=features, **flags)


def minatar_policy(path, script=eaudedqn_minatar, sparsity=0.5, env_id="Breakout", n_channels=4, n_actions=3, **flags):
    _, network = grid_network(sparsity, (4, 8), n_channels, n_actions)
    return write_policy(path, script, {"target": network}, env_id=env_id, features=(4, 8), **flags)


def mujoco_policy(path, script=eaudesac_mujoco, env_id="Probe-v5", sparsity=0.5, n_observations=2, n_actions=2):
    _, actor = actor_network(sparsity, (8, 8), n_observations, n_actions)
    critic = eaudesac_mujoco.Critic((8,))
    inputs = np.zeros(n_observations), np.zeros(n_actions)
    critics = [jax.device_get(critic.init(jax.random.key(i), *inputs)) for i in range(2)]
    networks = {"actor": actor, "critic_0": network_of(prune(critics[0], 0.9), "mujoco")}
    networks["critic_1"] = network_of(critics[1], "mujoco")
    return write_policy(path, script, networks, env_id=env_id, actor_features=(8, 8))


def refused(args, capsys):
    """The one line that a person sees."""
    with pytest.raises(SystemExit) as exit_info:
        play_policy.main(args)
    assert exit_info.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    return error


# ---- Forward pass ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("features", [TINY, (5, 7, 6, 40), (32, 64, 64, 512)])
def test_q_values_are_those_of_flax(sparsity, features):
    network, params = q_network(sparsity, features)
    observations = np.random.default_rng(1).integers(0, 256, (3, 4, 84, 84), dtype=np.uint8)
    observations[1] = 255
    expected = np.asarray(apply(network, params, observations))
    assert np.abs(expected).max() > 0.01
    for n in (1, 3):
        found = q_values(params, observations[:n])
        assert (found.shape, found.dtype) == ((n, 6), np.float32)
        np.testing.assert_allclose(found, expected[:n], rtol=0, atol=1e-5)
        dense = play_policy.forward(make_layers(params, sparse=False), observations[:n])
        np.testing.assert_allclose(dense, expected[:n], rtol=0, atol=1e-5)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("features", [(8,), (16, 12), (400, 300, 20), (512, 512), (4,) * 11])
def test_means_are_those_of_flax(sparsity, features):
    network, params = actor_network(sparsity, features)
    observations = np.random.default_rng(1).normal(size=(3, 11))  # float64, as MuJoCo's are
    expected = np.asarray(apply(network, params, observations)[0])
    for n in (1, 3):
        found = actor_mean(params, observations[:n])
        assert (found.shape, found.dtype) == ((n, 3), np.float32)
        np.testing.assert_allclose(found, expected[:n], rtol=0, atol=1e-5)


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
@pytest.mark.parametrize("n_channels", [4, 10])  # 10 x 10 x 10: no shape says where the channels are
def test_q_values_on_minatar_are_those_of_flax(sparsity, n_channels):
    network, params = grid_network(sparsity, (16, 128), n_channels)
    observations = np.random.default_rng(1).integers(0, 2, (3, 10, 10, n_channels), dtype=np.uint8)
    expected = np.asarray(apply(network, params, observations))
    assert np.abs(expected).max() > 0.01
    for n in (1, 3):
        found = q_values(params, observations[:n])
        assert (found.shape, found.dtype) == ((n, 3), np.float32)
        np.testing.assert_allclose(found, expected[:n], rtol=0, atol=1e-5)


@pytest.mark.parametrize("padding", ["SAME", "VALID"])
@pytest.mark.parametrize(("size", "stride"), [(8, 4), (4, 4), (3, 1), (1, 1), (5, 2), (3, 2), (7, 3), (2, 3), (6, 5)])
def test_convolutions_of_any_size_stride_and_padding_are_those_of_jax(size, stride, padding):
    """The strides are read from the file: that of 3 x 3 is not always 1. Two in a row, for the image in between."""
    rng = np.random.default_rng(0)
    kernels = rng.normal(size=(size, size, 4, 3)), rng.normal(size=(size, size, 3, 2))
    x = observations = rng.integers(0, 256, (2, 4, 84, 84), dtype=np.uint8)
    x = np.moveaxis(x, 1, -1) / np.float32(255)
    layers = {f"Conv_{i}": {"kind": "convolution", "stride": stride, "padding": padding} for i in range(2)}
    params = {}
    for name, kernel in zip(layers, kernels):
        kernel = kernel.astype(np.float32)
        params[name] = {"kernel": kernel, "bias": np.ones(kernel.shape[-1], np.float32)}
        dimensions = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), padding, dimension_numbers=dimensions)
        x = np.maximum(x + 1, 0)
    kernel = rng.normal(size=(x[0].size, 3)).astype(np.float32)
    params["Dense_0"] = {"kernel": kernel, "bias": np.zeros(3, np.float32)}
    network = {"params": params, "layers": layers | {"Dense_0": {"kind": "dense"}}, "world": "atari"}
    play_policy.check_network("policy.npz", network)
    expected = x.reshape(2, -1) @ kernel
    np.testing.assert_allclose(q_values(network, observations), expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def test_kernels_are_sparse_only_where_that_is_faster():
    def sparse_layers(params):
        return [not isinstance(layer.kernel, np.ndarray) for layer in make_layers(params)]

    features = (32, 64, 64, 512)
    assert sparse_layers(q_network(0.84, features)[1]) == [False] * 5
    assert sparse_layers(q_network(0.86, features)[1]) == [True, True, True, True, False]
    assert sparse_layers(q_network(0.95, (8, 8, 8, 16))[1]) == [True, True, True, False, False]  # 15,488 in the matrix
    assert sparse_layers(actor_network(0.95, (256, 256))[1]) == [False] * 3
    assert sparse_layers(actor_network(0.95, (512, 512))[1]) == [False] * 3  # few units of the second layer are used
    assert sparse_layers(actor_network(0.95, (512, 2048))[1]) == [False, True, False]


def test_hidden_units_that_nobody_sees_are_left_out():
    """Backwards: units 1 and 2 of the last hidden layer reach no output; then unit 0 before them reaches nobody."""
    kernels = np.ones((2, 3)), np.array([[0, 1, 1], [1, 0, 0], [1, 1, 1]]), np.array([[1, 1], [0, 0], [0, 0]])
    kernels = [x.astype(np.float32) for x in kernels]
    layers = {f"Dense_{i}": {"kernel": x, "bias": np.ones(x.shape[1])} for i, x in enumerate(kernels)}
    params = layers | {"Dense_3": layers["Dense_2"]}  # the head of an actor that does not play
    network = network_of({"params": params}, "mujoco")
    kept = make_layers(network)
    assert [layer.kernel.shape for layer in kept] == [(2, 2), (1, 2), (2, 1)]
    assert [len(layer.bias) for layer in kept] == [2, 1, 2]
    x = np.array([[0.3, -0.2], [2.0, 1.0]])
    full = play_policy.forward(make_layers(network, sparse=False), x)
    np.testing.assert_array_equal(actor_mean(network, x), full)
    assert [x["kernel"].shape for x in params.values()] == [(2, 3), (3, 3), (3, 2), (3, 2)]  # as they were


def test_the_network_that_is_played_needs_neither_jax_nor_more_than_one_thread(tmp_path):
    """And SciPy only if it is sparse enough."""
    code = (
        "import sys, play_policy, os; from pathlib import Path\n"
        "play_policy.main(play_policy.Args(Path(sys.argv[1]), episodes=1, horizon=5))\n"
        "print(os.environ['OPENBLAS_NUM_THREADS'], *[x for x in ('jax', 'flax', 'optax', 'scipy') if x in sys.modules])"
    )
    policies = {
        "1 scipy ": minatar_policy(tmp_path / "minatar.npz", sparsity=0.5),  # of the package minatar
        "1": atari_policy(tmp_path / "dense.npz", sparsity=0.5),
        "1 scipy": atari_policy(tmp_path / "sparse.npz", sparsity=0.9),
        "1 ": mujoco_policy(tmp_path / "mujoco.npz", env_id="Hopper-v5", n_observations=11, n_actions=3),
    }
    for expected, path in policies.items():
        command = [sys.executable, "-c", code, path]
        result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == expected.strip()
        assert result.stderr == ""


# ---- Policy file -----------------------------------------------------------------------------------------------------
def test_the_file_gives_back_the_networks_and_what_it_says_about_them(tmp_path):
    _, network = q_network(0.9)
    path = write_policy(tmp_path / "policy.npz", polyprune_dqn_atari, {"target": network}, env_id="MsPacman")
    about, networks = load_policy(str(path))  # as an engineer would call it
    assert networks.keys() == {"target"}
    assert_trees_equal(networks["target"]["params"], network["params"])
    assert (networks["target"]["layers"], networks["target"]["world"]) == (network["layers"], "atari")
    assert (about["script"], about["step"], about["args"]["env_id"]) == ("polyprune_dqn_atari", 70, "MsPacman")


def test_no_flipped_bit_loads_another_value(tmp_path, capsys):
    path, damaged = mujoco_policy(tmp_path / "policy.npz"), tmp_path / "damaged.npz"
    data, expected, n_refused = path.read_bytes(), load_policy(path), 0
    rng = np.random.default_rng(0)
    headers = [x.header_offset + i for x in zipfile.ZipFile(path).infolist() for i in range(30)]
    directory = range(data.index(b"PK\x01\x02"), len(data))
    positions = np.concatenate([rng.choice(x, 150, replace=False) for x in (range(len(data)), headers, directory)])
    flips = [(position, 1 << rng.integers(8)) for position in positions]
    flips += [(position, 1) for position in directory]  # makes critic_1 out of critic_0, of which there is one already
    for position, bit in flips:
        flipped = bytearray(data)
        flipped[position] ^= bit
        damaged.write_bytes(flipped)
        try:
            found = load_policy(damaged)
        except SystemExit:
            capsys.readouterr()
            assert "is damaged" in refused(Args(damaged), capsys)
            n_refused += 1
            continue
        assert found[0] == expected[0]
        assert_trees_equal(*[{name: x["params"] for name, x in networks.items()} for _, networks in (found, expected)])
    assert n_refused > 200


def test_a_flip_that_np_load_does_not_see_is_refused(tmp_path, capsys):
    """An npy header that says fewer weights: np.load does not read the rest, and does not look at the checksum."""
    path = tmp_path / "policy.npz"
    atari_policy(path)
    arrays = dict(np.load(path))
    with open(path, "wb") as file:
        np.savez(file, **arrays)
    data = path.read_bytes()
    shape = b"'shape': (363, 4)"  # more than the 4,096 bytes that are read at once
    assert data.count(shape) == 1
    path.write_bytes(data.replace(shape, b"'shape': (123, 4)"))
    assert "is damaged" in refused(Args(path), capsys)


def foreign_files(folder):
    text, checkpoint, older, empty = (folder / f"{name}.npz" for name in ("text", "checkpoint", "older", "empty"))
    text.write_text("hello")
    empty.write_bytes(b"")
    eaudedqn_atari.write_npz(checkpoint, {"step": 3, "rng": {}}, {"state": q_network(0)[1]["params"]})
    np.savez(older, about=json.dumps({"script": "eaudedqn_atari"}), **{"target/params/Conv_0/kernel/mask": np.ones(3)})
    return [text, checkpoint, older, empty]


def test_foreign_files_are_refused(tmp_path, capsys):
    for path in foreign_files(tmp_path):
        expected = f"error: {path} is damaged, or it is not the policy.npz of a run\n"
        assert refused(Args(path), capsys) == expected
    assert f"there is no {tmp_path}/missing.npz: give" in refused(Args(tmp_path / "missing.npz"), capsys)
    assert f"there is no {tmp_path}/policy.npz: give" in refused(Args(tmp_path), capsys)


def test_the_folder_of_a_run_stands_for_its_policy(tmp_path, catch_envs, capsys):
    path = atari_policy(tmp_path / "policy.npz", n_actions=3)
    outputs = []
    for given in (path, tmp_path):
        play_policy.main(Args(given, episodes=2))
        outputs.append(capsys.readouterr().out.split("ms per action")[0])
    assert outputs[0] == outputs[1]


def rename(old, new):
    """A layer, in the arrays and in what is said about them."""

    def change(about, arrays):
        layers = about["layers"]["target"]
        about["layers"]["target"] = {name.replace(old, new): kind for name, kind in layers.items()}
        for name in [name for name in arrays if old in name]:
            arrays[name.replace(old, new)] = arrays.pop(name)

    return change


def test_layers_may_have_other_names(tmp_path, catch_envs, capsys):
    """The order is that of the file; only numbers of one name are sorted, as JAX sorts 10 before 2."""
    path = atari_policy(tmp_path / "policy.npz", n_actions=3)
    expected = q_values(load_policy(path)[1]["target"], np.full((1, 4, 84, 84), 99, np.uint8))
    for old, new in (("Conv_", "Zoom_"), ("Dense_0", "Hidden"), ("Dense_1", "Advantage")):
        change_policy(path, rename(old, new))
    change_policy(path, lambda _, arrays: [arrays.update({x: arrays.pop(x)}) for x in sorted(arrays)])
    network = load_policy(path)[1]["target"]
    assert next(iter(network["params"])) == "Advantage"
    np.testing.assert_array_equal(q_values(network, np.full((1, 4, 84, 84), 99, np.uint8)), expected)
    long = "Dense_" + 5_000 * "9"
    names = ["Conv_0", "Conv_1", "Dense_0", "Dense_1", "Dense_10", long, "Dense_2", "Head"]
    assert play_policy.layer_names(dict.fromkeys(names))[-5:] == ["Dense_1", "Dense_2", "Dense_10", long, "Head"]


def add_norm(about, arrays, kind=None):
    arrays["target/params/LayerNorm_0/scale"] = np.ones(3)
    if kind:
        about["layers"]["target"]["LayerNorm_0"] = {"kind": kind}


def set_kind(layer, **settings):
    return lambda about, arrays: about["layers"]["target"][layer].update(settings)


def set_shape(name, *shape):
    return lambda about, arrays: arrays.update({f"target/params/{name}": np.ones(shape, np.float32)})


def set_weights(value):
    return lambda _, arrays: arrays.update({"target/params/Dense_1/bias": np.full(6, value)})


def keep(script, *kept):
    """Of the layers only these."""

    def change(about, arrays):
        about["script"], layers = script, about["layers"]["target"]
        for name in layers.keys() - set(kept):
            layers.pop(name)
            for tensor in ("kernel", "bias"):
                arrays.pop(f"target/params/{name}/{tensor}")

    return change


FUTURE = {  # what is changed in the file: what a person reads
    "{path} does not say what its layers are: its script is older, or": lambda about, _: about.pop("layers"),
    "{path} does not say its env_id": lambda about, _: about["args"].pop("env_id"),
    "{path} does not say its horizon: give --horizon": lambda about, _: about["args"].pop("horizon"),
    "{path} does not say its horizon: give --horizon\n": lambda about, _: about["args"].update(horizon="abc"),
    "{path} has an actor of one layer: it has two at least": keep("eaudesac_mujoco", "Dense_1"),
    "{path} ends with Conv_1, a convolution: this player does not know": keep("eaudedqn_atari", "Conv_0", "Conv_1"),
    "layer Dense_1 of {path} has float64 weights that are not finite floats": set_weights(np.nan),
    "layer Dense_1 of {path} has float64 weights that are not finite floats\n": set_weights(1e300),
    "layer Dense_1 of {path} has int64 weights that are not finite floats": set_weights(1),
    "this player does not know the world doom of {path}": lambda about, _: about.update(script="eaudedqn_doom"),
    "this player does not know layer LayerNorm_0": add_norm,
    "this player does not know layer LayerNorm_0\n": lambda *x: add_norm(*x, kind="norm"),
    "this player does not know layer Block_0": lambda about, arrays: (
        rename("Conv_1", "Block_0/Conv_1")(about, arrays)
        or about["layers"]["target"].update(Block_0={"kind": "residual"})
    ),
    "this player does not know layer Dense_1": set_kind("Dense_1", kind="attention"),
    "this player does not know layer Conv_1": lambda about, _: about["layers"]["target"].pop("Conv_1"),
    "this player does not know stride 0 with padding SAME of layer Conv_1": set_kind("Conv_1", stride=0),
    "this player does not know stride [2, 1] with padding SAME of": set_kind("Conv_1", stride=[2, 1]),
    "this player does not know stride 2 with padding CIRCULAR of": set_kind("Conv_1", padding="CIRCULAR"),
    "layer Dense_0 of {path} has bias, not": lambda _, arrays: arrays.pop("target/params/Dense_0/kernel"),
    "layer Dense_1 of {path} has no weights, not": lambda _, arrays: [
        arrays.pop(x) for x in list(arrays) if "e_1" in x
    ],
    "layer Dense_0 of {path} has bias, kernel, scale, not": set_shape("Dense_0/scale", 3),
    "layer Dense_0 of {path} has a kernel of shape (363, 4), which": set_kind("Conv_1", padding="VALID"),
    "layer Dense_0 of {path} has a kernel of shape (300, 4), which": set_shape("Dense_0/kernel", 300, 4),
    "layer Dense_1 of {path} has a kernel of shape (4, 6), which": set_shape("Dense_1/bias", 5),
    "layer Conv_0 of {path} has a kernel of shape (8, 8, 3, 2), which": set_shape("Conv_0/kernel", 8, 8, 3, 2),
    "layer Conv_1 of {path} has a kernel of shape (4, 3, 2, 3), which": set_shape("Conv_1/kernel", 4, 3, 2, 3),
    "layer Conv_0 of {path} has a kernel of shape (99, 99, 4, 2), which": set_shape("Conv_0/kernel", 99, 99, 4, 2),
    "{path} has 4 inputs and 9 outputs, its environment 4 and 6": lambda about, arrays: (
        set_shape("Dense_1/kernel", 4, 9)(about, arrays) or set_shape("Dense_1/bias", 9)(about, arrays)
    ),
}


@pytest.mark.parametrize(("message", "change"), FUTURE.items(), ids=range(len(FUTURE)))
def test_files_of_another_version_are_told_what_is_so_in_one_line(message, change, tmp_path, capsys):
    path = change_policy(atari_policy(tmp_path / "policy.npz"), change)
    assert f"error: {message.format(path=path)}" in refused(Args(path, episodes=1), capsys)


def test_a_network_for_another_environment_is_refused(tmp_path, capsys):
    path = minatar_policy(tmp_path / "minatar.npz", env_id="Seaquest")
    assert refused(Args(path), capsys) == f"error: {path} has 4 inputs and 3 outputs, its environment 10 and 6\n"
    path = mujoco_policy(tmp_path / "mujoco.npz", env_id="Hopper-v5")
    assert refused(Args(path), capsys) == f"error: {path} has 2 inputs and 2 outputs, its environment 11 and 3\n"


@pytest.mark.parametrize("about", ["[]", "{}", '{"script": 3, "args": {}, "step": 1}', '{"layers": ["Conv_0"]}'])
def test_an_about_of_another_kind_is_no_policy(about, tmp_path, capsys):
    path = atari_policy(tmp_path / "policy.npz")
    arrays = dict(np.load(path))
    np.savez(path, **arrays | {"about": about})
    assert "is damaged, or it is not the policy.npz of a run" in refused(Args(path), capsys)


# ---- Playing ---------------------------------------------------------------------------------------------------------
class RecordingEnv(CatchEnv):
    """Remembers seeds and actions of each episode."""

    def __init__(self, colour=False):
        super().__init__(1)
        self.colour, self.seeds, self.actions = colour, [], []

    def paint(self, observations):
        return np.stack([observations] * 3, axis=-1) if self.colour else observations

    def reset(self, seed):
        self.seeds.append(seed)
        self.actions.append([])
        observations, info = super().reset(seed)
        return self.paint(observations), info

    def step(self, actions):
        assert actions.shape == (1,)
        self.actions[-1].append(int(actions[0]))
        observations, *rest = super().step(actions)
        return self.paint(observations), *rest


@pytest.fixture
def catch_envs(monkeypatch):
    envs = []

    def make_atari_env(env_id, horizon, colour=False):
        envs.append(RecordingEnv(colour))
        envs[-1].made_of = env_id, horizon
        return envs[-1]

    monkeypatch.setattr(play_policy, "make_atari_env", make_atari_env)
    return envs


class Filmed(Probe):
    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return np.full((40, 60, 3), 40 * self.step_number, np.uint8)


@pytest.fixture
def probe_envs(monkeypatch):
    envs = []

    def make(render_mode=None):
        envs.append(Filmed(render_mode))
        return envs[-1]

    gymnasium = play_policy.gymnasium
    spec = dataclasses.replace(gymnasium.spec("Probe-v5"), entry_point=make)
    monkeypatch.setitem(gymnasium.registry, "Probe-v5", spec)
    return envs


def test_greedy_actions_and_their_returns_are_those_of_the_network(tmp_path, catch_envs, capsys):
    path = atari_policy(tmp_path / "policy.npz", n_actions=3)
    play_policy.main(Args(path, episodes=12, epsilon=0, seed=5))
    lines, returns = capsys.readouterr().out.splitlines(), []
    network, loaded = q_network(0.5, n_actions=3)
    params, flax_apply = {"params": loaded["params"]}, jax.jit(network.apply)
    (env,) = catch_envs
    assert len(set(env.seeds)) == 12
    for seed, played in zip(env.seeds, env.actions):
        game, rewards, done = CatchEnv(1), [], False
        observations, _ = game.reset(seed)
        for action in played:
            assert not done
            assert action == flax_apply(params, observations).argmax()
            observations, reward, (done,), _, _ = game.step([action])
            rewards.append(reward[0])
        assert done
        returns.append(sum(rewards))
    assert len(set(returns)) == 2
    assert (
        f"Return {np.mean(returns):.1f} +- {np.std(returns):.1f}, mean and standard deviation of 12 episodes" in lines
    )
    assert "Each: " + " ".join(map(str, returns)) in lines


@pytest.mark.parametrize("script", ATARI, ids=lambda script: script.__name__)
def test_policies_of_all_atari_scripts_are_played_and_filmed(script, tmp_path, catch_envs, capsys):
    path, video = atari_policy(tmp_path / "policy.npz", script, n_actions=3, horizon=77), tmp_path / "out.gif"
    of_a_later_version = {"other/params/Dense_0/kernel": np.ones(3), "norms/batch_stats/Norm_0/mean": np.ones(3)}
    change_policy(path, lambda _, arrays: arrays.update(of_a_later_version))
    play_policy.main(Args(path, episodes=4, video=video, seed=5))
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"Pong, {script.__name__}\.py after 70 steps, sparsity of target 0\.\d+", lines[0])
    played, filmed = catch_envs
    assert (played.colour, filmed.colour) == (False, True)
    assert played.made_of == filmed.made_of == ("Pong", 77)  # the run's own horizon
    assert (filmed.seeds, filmed.actions) == (played.seeds[:1], played.actions[:1])
    assert imageio.imread(video).shape == (6, 84, 84, 3)  # 6 steps: the last one leads to the next episode
    assert not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("script", MUJOCO, ids=lambda script: script.__name__)
def test_policies_of_both_mujoco_scripts_are_played_and_filmed(script, tmp_path, probe_envs, capsys):
    path, video = mujoco_policy(tmp_path / "policy.npz", script), tmp_path / "out.gif"
    play_policy.main(Args(path, episodes=3, video=video))
    lines = capsys.readouterr().out.splitlines()
    assert re.match(
        rf"Probe-v5, {script.__name__}\.py after 70 steps, sparsity of actor 0\.\d+, critic_0 0\.", lines[0]
    )
    assert "Return 5.0 +- 0.0, mean and standard deviation of 3 episodes" in lines
    network, params = actor_network(0.5, (8, 8), 2, 2)
    played = next(env for env in probe_envs if env.render_mode is None)
    observations = np.array([(episode, step) for episode in range(3) for step in range(5)])
    mean, _ = apply(network, params, observations)
    np.testing.assert_allclose(played.actions, 1 + 3 * np.tanh(mean), atol=1e-4)  # scaled from [-1, 1] to [-2, 4]
    assert len(set(played.seeds)) == 3
    frames = imageio.imread(video)
    assert frames.shape == (3, 20, 30, 3)  # every second of 5 observations, every second pixel
    np.testing.assert_allclose(frames[:, 0, 0, 0], [0, 80, 160], atol=2)
    assert imageio.immeta(video)["duration"] == 100


@pytest.mark.parametrize("script", MINATAR, ids=lambda script: script.__name__)
def test_policies_of_both_minatar_scripts_are_played_and_filmed(script, tmp_path, capsys):
    """The same games as in the training script's own environment, with the actions that flax would take."""
    path, video = minatar_policy(tmp_path / "policy.npz", script, horizon=20), tmp_path / "out.gif"
    play_policy.main(Args(path, episodes=3, epsilon=0, seed=4, video=video))
    lines = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"Breakout, {script.__name__}\.py after 70 steps, sparsity of target 0\.\d+", lines[0])
    network, loaded = grid_network(0.5)
    rng, env, returns, lengths = np.random.default_rng(4), script.MinAtarEnv("Breakout", 20), [], []
    for _ in range(3):
        observation, _ = env.reset(int(rng.integers(2**30)))
        score, done, length = 0, False, 0
        while not done:
            q = apply(network, loaded, observation[None])
            observation, reward, terminal, truncation, _ = env.step(int(q.argmax()))
            score, done, length = score + reward, terminal or truncation, length + 1
            rng.random()  # epsilon's
        returns.append(score)
        lengths.append(length)
    assert "Each: " + " ".join(map(str, returns)) in lines
    frames = imageio.imread(video)
    assert frames.shape == (lengths[0], 200, 200, 3)
    first = script.MinAtarEnv("Breakout", 20).reset(int(np.random.default_rng(4).integers(2**30)))[0]
    cells = frames[0, 10::20, 10::20].any(axis=-1)  # not black
    np.testing.assert_array_equal(cells, first.any(axis=-1))
    assert (np.kron(frames[0, ::20, ::20], np.ones((20, 20, 1))) == frames[0]).all()  # squares
    assert len({tuple(x) for x in frames[0, ::20, ::20].reshape(-1, 3)}) == 4  # background, paddle, ball, bricks


# What is seen without red and without green cones: Machado et al., 2009, severity 1, of linear RGB.
SEEN = {
    "by most": np.eye(3),
    "with protanopia": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "with deuteranopia": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])  # of linear RGB


@pytest.mark.parametrize("seen", SEEN)
def test_colours_of_a_film_can_be_told_apart(seen):
    """All pairs, the background's too: by their distance in CIELAB. Of matplotlib's tab10 it falls to 5 and 7."""
    colours = np.frombuffer(play_policy.COLOURS, np.uint8).reshape(-1, 3) / 255
    linear = np.where(colours > 0.04045, ((colours + 0.055) / 1.055) ** 2.4, colours / 12.92)
    x, y, z = XYZ @ np.clip(SEEN[seen] @ linear.T, 0, 1) / XYZ.sum(axis=1, keepdims=True)
    x, y, z = [np.where(v > 0.008856, np.cbrt(v), 7.787 * v + 16 / 116) for v in (x, y, z)]
    lab = np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)]).T
    for i, j in itertools.combinations(range(len(lab)), 2):
        assert np.linalg.norm(lab[i] - lab[j]) > 29, (i, j)


@pytest.mark.parametrize("env_id", ["Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"])
def test_a_minatar_game_is_the_one_of_training(env_id):
    """Also after another episode, whose last action must not stick in the next one."""
    trained, played = eaudedqn_minatar.MinAtarEnv(env_id, 300), play_policy.GridGame(env_id, 300)
    rng = np.random.default_rng(0)
    for seed in (3, 4, 3):
        observation, (observations, _) = trained.reset(seed)[0], played.reset(seed)
        assert observations.dtype == np.uint8
        done = False
        while not done:
            np.testing.assert_array_equal(observation, observations[0])
            action = rng.integers(len(played.action_set))
            observation, *left, _ = trained.step(action)
            observations, *right, _ = played.step(np.array([action]))
            assert left == [x[0] for x in right]
            done = any(left[1:])
    assert played.render().shape == (200, 200, 3)


def test_epsilon_is_the_share_of_random_actions_on_minatar(tmp_path, monkeypatch):
    asked, path = [], minatar_policy(tmp_path / "policy.npz")
    monkeypatch.setattr(play_policy, "q_values", lambda network, x: asked.append(1) or np.array([[0.0, 1.0, 0.0]]))
    lengths, step = [], play_policy.GridGame.step
    monkeypatch.setattr(play_policy.GridGame, "step", lambda env, x: lengths.append(int(x[0])) or step(env, x))
    play_policy.main(Args(path, episodes=60, epsilon=0.4))
    assert len(asked) / len(lengths) == pytest.approx(0.6, abs=0.06)
    assert set(lengths) == {0, 1, 2}


def test_the_same_seed_plays_the_same_games_and_another_one_others(tmp_path, catch_envs):
    path = atari_policy(tmp_path / "policy.npz", n_actions=3)
    for seed in (5, 5, 6):
        play_policy.main(Args(path, episodes=3, epsilon=0.5, seed=seed))
    first, again, other = ((env.seeds, env.actions) for env in catch_envs)
    assert first == again != other


def test_epsilon_is_the_share_of_random_actions(tmp_path, catch_envs, monkeypatch):
    path, asked = atari_policy(tmp_path / "policy.npz", n_actions=3), []
    monkeypatch.setattr(play_policy, "q_values", lambda network, x: asked.append(1) or np.array([[0.0, 1.0, 0.0]]))
    for epsilon in (0, 0.3, 1):
        asked.clear()
        play_policy.main(Args(path, episodes=100, epsilon=epsilon))
        n_steps = sum(map(len, catch_envs[-1].actions))
        assert len(asked) / n_steps == pytest.approx(1 - epsilon, abs=0.06)
    shares = np.bincount(np.concatenate(catch_envs[-1].actions)) / n_steps
    np.testing.assert_allclose(shares, 1 / 3, atol=0.06)


@pytest.mark.parametrize("horizon", [None, 9])
def test_the_horizon_cuts_an_episode(horizon, tmp_path, monkeypatch):
    lengths, step = [], play_policy.play_episode

    def play_episode(*inputs):
        rewards, actions, timed = step(*inputs)
        lengths.append(len(actions))
        return rewards, actions, timed

    monkeypatch.setattr(play_policy, "play_episode", play_episode)
    play_policy.main(Args(atari_policy(tmp_path / "a.npz", horizon=12), episodes=1, horizon=horizon))
    path = mujoco_policy(tmp_path / "m.npz", env_id="HalfCheetah-v5", n_observations=17, n_actions=6)
    play_policy.main(Args(path, episodes=1, horizon=horizon))
    assert lengths == ([9, 9] if horizon else [12, 1_000])


def test_the_game_is_the_one_of_training_and_the_film_shows_the_same_one():
    """The same seed and actions, in the training script or here in grey or in colour, give the same rewards."""
    ours, colour = play_policy.make_atari_env("Pong", 27_000), play_policy.make_atari_env("Pong", 27_000, colour=True)
    envs = [eaudedqn_atari.make_env("Pong", 1, 27_000), ours, colour]
    trained, played, filmed = (env.reset(seed=11)[0] for env in envs)
    assert filmed.shape == (1, 4, 210, 160, 3)
    rng, rewards = np.random.default_rng(0), []
    for _ in range(400):
        np.testing.assert_array_equal(trained, played)
        actions = rng.integers(6, size=1)
        (trained, *left), (played, *right), (filmed, *third) = (env.step(actions)[:4] for env in envs)
        assert left == right == third
        rewards.append(left[0][0])
    assert np.any(rewards)
    np.testing.assert_array_equal(trained, played)


def test_the_mujoco_task_is_the_one_of_training():
    envs = [eaudesac_mujoco.make_env("Hopper"), play_policy.make_mujoco_env("Hopper-v5", None)]
    observations = [env.reset(seed=3)[0] for env in envs]
    rng = np.random.default_rng(0)
    for _ in range(10):
        np.testing.assert_array_equal(*observations)
        action = rng.uniform(-1, 1, 3).astype(np.float32)
        observations = [env.step(action)[0] for env in envs]


def test_the_price_list_counts_the_network_that_plays(tmp_path, probe_envs, catch_envs, capsys):
    features = (4, 4, 4, 8)
    paths = {
        "target": atari_policy(tmp_path / "atari.npz", sparsity=0.9, features=features, n_actions=3),
        "actor": mujoco_policy(tmp_path / "mujoco.npz"),
    }
    for name, path in paths.items():
        play_policy.main(Args(path, episodes=1))
        rows = capsys.readouterr().out.split(f"The {name}")[1].splitlines()
        numbers = [[float(x.replace(",", "")) for x in row.split()[-2:]] for row in rows[1:4]]
        members = zipfile.ZipFile(path).infolist()
        tensors = [np.load(path)[x.filename[:-4]] for x in members if x.filename.startswith(f"{name}/")]
        kernels = [x for x in tensors if x.ndim > 1]
        compressed = sum(x.compress_size for x in members if x.filename.startswith(f"{name}/"))
        assert numbers[0][0] == compressed < numbers[0][1] < 128 * len(tensors) + 4 * sum(x.size for x in tensors)
        assert numbers[1] == [sum(map(np.count_nonzero, kernels)), sum(x.size for x in kernels)]
        assert min(numbers[2]) > 0
        output = kernels[-1] if name == "target" else kernels[-2]  # the last of an actor does not play
        n_idle, n_sparse = np.sum(~output.any(axis=1)), "3 of 5" if name == "target" else "0 of 3"
        assert rows[4] == f"Sparse products in {n_sparse} layers, {n_idle} idle hidden units left out"


def test_a_network_without_a_zero_costs_what_a_dense_one_does(tmp_path, catch_envs, capsys):
    play_policy.main(Args(atari_policy(tmp_path / "policy.npz", sparsity=0, n_actions=3), episodes=1))
    row = re.search(r"Bytes in the file +(\S+) +(\S+)", capsys.readouterr().out)
    assert row[1] == row[2]


@pytest.mark.parametrize("sparsity", [0.5, 0.95])
def test_a_network_filled_up_is_to_zip_as_one_that_was_never_pruned(sparsity):
    """Copies of the kept weights in place of draws are a third smaller at 0.95: zip finds them."""
    dense, pruned = (q_network(x, (8, 16, 16, 256))[1]["params"] for x in (0, sparsity))
    filled = play_policy.fill_zeros(pruned)
    assert all(x["kernel"].all() for x in filled.values())
    for name, layer in pruned.items():
        kept = layer["kernel"] != 0
        np.testing.assert_array_equal(filled[name]["kernel"][kept], layer["kernel"][kept])
    sizes = [play_policy.compressed_bytes(x) for x in (dense, pruned, filled)]
    assert sizes[2] == pytest.approx(sizes[0], rel=0.01)
    assert sizes[1] < 0.8 * sizes[2]


def test_progress_is_plain_lines_without_a_terminal_and_one_line_in_it(tmp_path, catch_envs, capsys, monkeypatch):
    path = atari_policy(tmp_path / "policy.npz", n_actions=3)
    play_policy.main(Args(path, episodes=2))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" episodes")[0] for line in lines[1:4]] == [
        "[                    ] 0/2",
        "[##########          ] 1/2",
        "[####################] 2/2",
    ]

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdout", Terminal())
    play_policy.main(Args(path, episodes=2))
    first, bar, *_ = sys.stdout.getvalue().split("\n")
    assert first.startswith("Pong")
    assert [part[:24] for part in bar.split("\r")[1:]] == [
        "[                    ] 0",
        "[##########          ] 1",
        "[####################] 2",
    ]


# ---- Recording -------------------------------------------------------------------------------------------------------
def test_what_is_played_is_recorded_and_an_offline_script_reads_it(tmp_path, catch_envs):
    path, folder = atari_policy(tmp_path / "policy.npz", n_actions=3), tmp_path / "new" / "data"
    for epsilon in (0, 1):
        play_policy.main(Args(path, episodes=10, epsilon=epsilon, record_dir=folder, record_rows=20))
    n_files = len(list(folder.glob("$store$_action_ckpt.*.gz")))
    args = eaudecql_atari.Args(dataset_dir=folder)
    files = [eaudecql_atari.load_file(args, number, n_actions=3) for number in range(n_files)]
    recorded = np.concatenate([actions[frames.any(axis=(1, 2))] for frames, actions, _, _ in files])
    np.testing.assert_array_equal(recorded, np.concatenate([x for env in catch_envs for x in env.actions]))
    assert sum(terminals.sum() for *_, terminals in files) == 20
    assert len(set(recorded[60:])) == 3


def test_ctrl_c_keeps_what_was_recorded(tmp_path, catch_envs, monkeypatch):
    path, folder, played = atari_policy(tmp_path / "policy.npz", n_actions=3), tmp_path / "data", []

    def interrupt(returns, n_episodes):
        played.append(len(returns))
        if len(returns) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(play_policy, "show_progress", interrupt)
    with pytest.raises(SystemExit) as exit_info:
        play_policy.main(Args(path, episodes=10, record_dir=folder))
    assert (exit_info.value.code, played) == (130, [0, 1, 2])
    *_, terminals = eaudecql_atari.load_file(eaudecql_atari.Args(dataset_dir=folder), 0, n_actions=3)
    assert terminals.sum() == 2


# ---- Errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(episodes=0), "--episodes must be from 1 to"),
        (dict(epsilon=1.1), "--epsilon must be from 0 to 1, not 1.1"),
        (dict(epsilon=float("nan")), "--epsilon must be from 0 to 1, not nan"),
        (dict(seed=-1), "--seed must be from 0 to"),
        (dict(horizon=0), "--horizon must be from 1 to"),
        (dict(record_rows=4), "--record-rows must be from 5 to"),
        (dict(video=Path("out.mp4")), "--video out.mp4 must be a .gif file"),
        (dict(video=Path("nowhere/out.gif")), "cannot write to nowhere: No such file or directory"),
        (dict(video=Path("/proc/out.gif")), "cannot write to /proc: "),
        (dict(video=Path("folder.gif")), "folder.gif is a folder"),
        (dict(record_dir=Path("policy.npz")), "File exists: 'policy.npz'"),
        (dict(record_dir=Path("policy.npz/data")), "Not a directory: 'policy.npz/data'"),
        (dict(record_dir=Path("/proc/data")), "/proc/data"),
        (dict(record_dir=Path("folder.gif")), "has other files, such as notes.txt"),
    ],
)
def test_mistakes_are_told_in_one_line_and_leave_nothing(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = atari_policy(Path("policy.npz"))
    Path("folder.gif").mkdir()
    Path("folder.gif/notes.txt").touch()
    before = sorted(Path().rglob("*"))
    assert message in refused(Args(path, **flags), capsys)
    assert sorted(Path().rglob("*")) == before


@pytest.mark.parametrize(
    ("make", "env_id"), [(atari_policy, "Tetrris"), (mujoco_policy, "Ant-v99"), (minatar_policy, "Tetris")]
)
def test_what_is_not_installed_is_said_in_one_line(make, env_id, tmp_path, capsys):
    path = make(tmp_path / "policy.npz", env_id=env_id)
    flags = dict(record_dir=tmp_path / "data") if make is atari_policy else {}
    assert f"{env_id} cannot be played here" in refused(Args(path, **flags), capsys)
    assert list(tmp_path.iterdir()) == [path]


def test_a_machine_that_cannot_draw_is_told_before_it_plays(tmp_path, capsys, probe_envs, monkeypatch):
    def render(env):
        raise RuntimeError("no screen")

    monkeypatch.setattr(Filmed, "render", render)
    path = mujoco_policy(tmp_path / "policy.npz")
    error = refused(Args(path, video=tmp_path / "out.gif"), capsys)
    assert error == "error: Probe-v5 cannot be filmed here: no screen\n"
    assert not any(env.actions for env in probe_envs)
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_for_other_worlds_is_refused(tmp_path, capsys, probe_envs):
    mujoco, minatar = mujoco_policy(tmp_path / "mujoco.npz"), minatar_policy(tmp_path / "minatar.npz")
    assert refused(Args(mujoco, epsilon=1.0), capsys) == "error: --epsilon is for Atari and MinAtar\n"
    for path in (mujoco, minatar):
        error = refused(Args(path, record_dir=tmp_path / "data"), capsys)
        assert error == "error: --record-dir is for Atari alone: its files hold frames of 84 x 84\n"
    assert sorted(tmp_path.iterdir()) == [minatar, mujoco]


@pytest.mark.parametrize("function", ["numpy/__init__.<module>", "cli.cli", "play_policy.play_episode"])
def test_ctrl_c_leaves_no_traceback(function, tmp_path):
    """During the imports, while flags are read, and while it plays."""
    code = (
        "import os, runpy, signal, sys\n"
        "function, *sys.argv = sys.argv[1:]\n"
        "def strike(frame, event, _):\n"
        "    if event == 'call' and f'{frame.f_code.co_filename}.{frame.f_code.co_name}'.replace('.py.', '.')"
        ".endswith(function):\n"
        "        sys.setprofile(None)\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.setprofile(strike)\n"
        "runpy.run_path('play_policy.py', run_name='__main__')\n"
    )
    path = atari_policy(tmp_path / "policy.npz")
    command = [sys.executable, "-c", code, function, "play_policy.py", path]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode in (130, -2)
    assert result.stderr == ""


def test_a_path_with_a_space_is_quoted(tmp_path, catch_envs, capsys):
    path, folder = atari_policy(tmp_path / "policy.npz", n_actions=3), tmp_path / "my data"
    play_policy.main(Args(path, episodes=1, record_dir=folder))
    assert f"Recorded in '{folder}', next number 1\n" in capsys.readouterr().out


def test_a_film_that_cannot_be_finished_leaves_the_one_before(tmp_path, capsys, catch_envs, monkeypatch):
    path, video = atari_policy(tmp_path / "policy.npz", n_actions=3), tmp_path / "out.gif"
    video.write_bytes(b"the film before")

    def write_bytes(path, content):
        with open(path, "wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    error = refused(Args(path, episodes=1, video=video), capsys)
    assert error == f"error: cannot write {video}: No space left on device\n"
    assert sorted(tmp_path.iterdir()) == [video, path]
    assert video.read_bytes() == b"the film before"


def test_help_lists_every_flag_with_its_text():
    environment = {**os.environ, "COLUMNS": "250"}
    command = [sys.executable, "play_policy.py", "--help"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    for field in dataclasses.fields(Args):
        name = "PATH" if field.name == "path" else "--" + field.name.replace("_", "-")
        line = re.search(rf"^.*{name} .*$", result.stdout, re.MULTILINE)[0]
        assert len(re.findall(r"[a-z]{2,}", line)) > 4, line
