"""The policy file: the network it came from, in as many bytes as it has weights, and what plays it."""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import ClassVar

import imageio.v3 as imageio
import jax
import numpy as np
import pytest
from catch import CatchEnv
from common import TINY, assert_trees_equal
from probe import Probe
from test_resume import checkpoint

import eaudecql_atari
import eaudedqn_atari
import eaudesac_mujoco
import polyprune_cql_atari
import polyprune_dqn_atari
import polyprune_sac_mujoco

ATARI = [eaudedqn_atari, eaudecql_atari, polyprune_dqn_atari, polyprune_cql_atari]
MUJOCO = [eaudesac_mujoco, polyprune_sac_mujoco]
README = (Path(__file__).parent.parent / "README.md").read_text()


def pruned_network(sparsity, features=TINY):
    network = eaudedqn_atari.QNetwork(features, 6)
    params = jax.device_get(jax.jit(network.init)(jax.random.key(0), np.zeros((1, 4, 84, 84), np.uint8)))
    params = jax.tree.map(lambda x: x if x.ndim > 1 else x + 0.1, params)  # biases as learned ones are: not zero
    return network, jax.tree.map(np.multiply, params, eaudedqn_atari.magnitude_masks(params, sparsity, "uniform"))


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.9])
def test_the_file_gives_back_the_network_and_what_is_needed_to_build_it(sparsity, tmp_path):
    _, params = pruned_network(sparsity)
    args = eaudedqn_atari.Args(env_id="mspacman", features=TINY)
    eaudedqn_atari.save_policy(tmp_path / "policy.npz", args, 70, {"target": params})
    about, networks = polyprune_dqn_atari.load_policy(tmp_path / "policy.npz")  # also in another script
    assert_trees_equal(networks, {"target": params})
    shapes = about.pop("shapes")
    assert shapes["target/params/Dense_1/kernel"] == [4, 6]
    assert about.pop("sparsity") == {"target": pytest.approx(sparsity, abs=0.02)}
    assert about == dict(script="eaudedqn_atari", env_id="MsPacman", step=70, features=[*TINY])
    assert not list(tmp_path.glob("*.tmp"))


def test_the_size_falls_with_the_sparsity_as_the_readme_says(tmp_path):
    sizes = {}
    for sparsity in (0, 0.5, 0.9, 0.95, 0.99):
        _, params = pruned_network(sparsity, features=(32, 64, 64, 512))
        path = tmp_path / f"{sparsity}.npz"
        eaudedqn_atari.save_policy(path, eaudedqn_atari.Args(), 0, {"target": params})
        sizes[sparsity] = path.stat().st_size
    assert sizes[0.95] < sizes[0] / 10
    row = re.search(r"^\| `policy.npz` \| (.*) \|$", README, re.MULTILINE)[1].split(" | ")
    assert row == [f"{size / 1e6:.2f} MB" for size in sizes.values()]


def test_the_readmes_lines_load_the_policy_with_numpy_alone(tmp_path, monkeypatch):
    code = re.search(r"```python\n(import json\n.*?)```", README, re.DOTALL)[1]
    assert len(code.splitlines()) <= 7
    _, params = pruned_network(0.9)
    eaudedqn_atari.save_policy(tmp_path / "policy.npz", eaudedqn_atari.Args(features=TINY), 0, {"target": params})
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code, names)
    tensors = eaudedqn_atari.flax.traverse_util.flatten_dict({"target": params}, sep="/")
    assert names["weights"].keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(names["weights"][name], x)


FLAGS = dict(total_timesteps=120, learning_starts=50, batch_size=8)


@pytest.mark.parametrize("script", [eaudedqn_atari, polyprune_dqn_atari], ids=["eaudedqn", "polyprune_dqn"])
def test_the_policy_of_a_run_is_its_target_and_plays_as_it_does(script, tmp_path, monkeypatch):
    monkeypatch.setattr(script, "make_env", lambda env_id, n_envs, horizon: CatchEnv(n_envs))
    args = script.Args(runs_dir=tmp_path, features=TINY, target_period=20, buffer_size=100, **FLAGS)
    run = script.train(args)
    network = script.QNetwork(TINY, 3)
    structure = jax.tree.structure(script.init_agent(args, network, jax.random.key(0)))
    state = jax.tree.unflatten(structure, checkpoint(run)["state"])
    about, networks = script.load_policy(run / "policy.npz")
    assert_trees_equal(networks["target"], state.target_params)
    assert about["step"] == 120
    observations = np.random.default_rng(0).integers(0, 256, (50, 4, 84, 84), dtype=np.uint8)
    actions = [script.greedy_actions(network, x, observations) for x in (networks["target"], state.target_params)]
    np.testing.assert_array_equal(*actions)


@pytest.mark.parametrize("script", MUJOCO, ids=["eaudesac", "polyprune_sac"])
def test_the_policy_of_a_run_is_its_actor_and_the_critics_chosen_as_target(script, tmp_path):
    args = script.Args(env_id="Probe", runs_dir=tmp_path, critic_features=(8,), actor_features=(8,), **FLAGS)
    run = script.train(args)
    actor, critic = script.Actor((8,), 2), script.Critic((8,))
    structure = jax.tree.structure(script.init_agent(args, actor, critic, jax.random.key(0), np.zeros(2)))
    state = jax.tree.unflatten(structure, checkpoint(run)["state"])
    _, networks = script.load_policy(run / "policy.npz")
    assert_trees_equal(networks["actor"], state.actor_params)
    for i in range(2):
        idx = (i, state.target_idx[i]) if script is eaudesac_mujoco else i
        assert_trees_equal(networks[f"critic_{i}"], jax.tree.map(lambda x, idx=idx: x[idx], state.params))


def printed(script, args):
    with redirect_stdout(io.StringIO()) as output:
        script.main(args)
    return output.getvalue().splitlines()


class RecordingEnv(CatchEnv):
    def __init__(self, n_envs, colour):
        super().__init__(n_envs)
        self.colour, self.actions = colour, []

    def reset(self, seed):
        self.seed = seed
        observations, info = super().reset(seed)
        return np.stack([observations] * 3, axis=-1) if self.colour else observations, info

    def step(self, actions):
        self.actions.append(actions[0])
        observations, *rest = super().step(actions)
        return np.stack([observations] * 3, axis=-1) if self.colour else observations, *rest


@pytest.mark.parametrize("script", ATARI, ids=lambda script: script.__name__)
def test_a_policy_is_played_and_filmed_on_atari(script, tmp_path, monkeypatch):
    envs = []

    def make_env(env_id, n_envs, horizon, colour=False):
        envs.append(RecordingEnv(n_envs, colour))
        return envs[-1]

    monkeypatch.setattr(script, "make_env", make_env)
    network, params = pruned_network(0.5)
    params["params"]["Dense_1"] = jax.tree.map(lambda x: x[..., :3], params["params"]["Dense_1"])
    path, video = tmp_path / "policy.npz", tmp_path / "out.gif"
    script.save_policy(path, script.Args(env_id="Breakout", features=TINY), 7, {"target": params})
    args = script.Args(evaluate=path, eval_episodes=4, capture_video=video, seed=5)
    lines = printed(script, args)
    network = script.QNetwork(TINY, 3)
    returns = script.evaluate(script.Args(eval_episodes=4), np.random.default_rng(5), network, params)
    sparsity = script.sparsity_of(jax.tree.map(lambda x: x != 0, params))
    assert lines == [
        f"Breakout, {script.__name__}.py after 7 steps, sparsity of target {sparsity:.3f}",
        f"Return {returns.mean():.1f} +- {returns.std():.1f}, mean and standard deviation of 4 episodes",
        "Each: " + " ".join(map(str, returns)),
    ]
    played, filmed = envs[:2]
    assert (played.n_envs, played.colour, filmed.n_envs, filmed.colour) == (4, False, 1, True)
    assert filmed.seed == played.seed
    assert filmed.actions == played.actions[: len(filmed.actions)]
    assert len(filmed.actions) == 5  # an episode of 6 steps: the last one leads to the next episode
    assert imageio.imread(video).shape == (6, 84, 84, 3)


def test_the_film_is_in_the_emulators_colours_and_of_the_same_game():
    """The same seed and actions, in one of several environments or alone in colour, give the same rewards."""
    envs = [eaudedqn_atari.make_env("Pong", 3, 27_000), eaudedqn_atari.make_env("Pong", 1, 27_000, colour=True)]
    for env in envs:
        observations, _ = env.reset(seed=11)
    assert observations.shape == (1, 4, 210, 160, 3)
    rng, rewards = np.random.default_rng(0), []
    for _ in range(400):
        actions = rng.integers(6, size=3)
        rewards.append([env.step(actions[: env.num_envs])[1][0] for env in envs])
    left, right = np.transpose(rewards)
    assert np.any(left)
    np.testing.assert_array_equal(left, right)


class Filmed(Probe):
    metadata: ClassVar = {"render_modes": ["rgb_array"], "render_fps": 20}

    def __init__(self, render_mode=None):
        super().__init__()
        self.render_mode = render_mode

    def render(self):
        return np.full((40, 60, 3), 40 * self.step_number, np.uint8)


@pytest.mark.parametrize("script", MUJOCO, ids=["eaudesac", "polyprune_sac"])
def test_a_policy_is_played_and_filmed_on_mujoco(script, tmp_path, monkeypatch, capsys):
    args = script.Args(env_id="Probe", runs_dir=tmp_path, critic_features=(8,), actor_features=(8,), **FLAGS)
    path, video = script.train(args) / "policy.npz", tmp_path / "out.gif"
    args = script.Args(evaluate=path, eval_episodes=3, capture_video=video)
    monkeypatch.setitem(script.gymnasium.registry, "Probe-v0", script.gymnasium.spec("Probe-v0"))
    monkeypatch.setattr(script.gymnasium.spec("Probe-v0"), "entry_point", Filmed)
    summary = printed(script, args)
    assert summary[0].startswith(f"Probe-v0, {script.__name__}.py after 120 steps, sparsity of actor 0.000, critic_0 ")
    assert summary[1:] == ["Return 5.0 +- 0.0, mean and standard deviation of 3 episodes", "Each: 5.0 5.0 5.0"]
    frames = imageio.imread(video)
    assert frames.shape == (3, 20, 30, 3)  # every second of the 6 observations, every second pixel
    np.testing.assert_allclose(frames[:, 0, 0, 0], [0, 80, 160], atol=2)
    assert imageio.immeta(video)["duration"] == 100

    def render(env):
        raise RuntimeError("no screen")

    monkeypatch.setattr(Filmed, "render", render)
    with pytest.raises(SystemExit) as exit_info:
        script.main(args)
    assert exit_info.value.code == 2
    expected = "error: MuJoCo cannot render on this machine (no screen): leave out --capture-video\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("script", ATARI + MUJOCO, ids=lambda script: script.__name__)
def test_a_video_is_a_gif_of_an_evaluation(script, tmp_path, capsys):
    policy, gif = Path("policy.npz"), tmp_path / "out.gif"
    for flags in (dict(capture_video=gif), dict(evaluate=policy, capture_video=gif.with_suffix(".mp4"))):
        with pytest.raises(SystemExit) as exit_info:
            script.main(script.Args(**flags))
        assert exit_info.value.code == 2
        expected = f"error: --capture-video {flags['capture_video']} must be a .gif file in a folder that exists, and "
        assert capsys.readouterr().err == expected + "goes with --evaluate\n"
    assert list(tmp_path.iterdir()) == []
