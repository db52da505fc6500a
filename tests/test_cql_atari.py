"""EauDeCQL and PolyPruneCQL: the loss, many updates in a call, evaluation, and whole runs from files."""

import dataclasses
import functools
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from catch import Catch, CatchEnv
from common import TINY, assert_trees_equal, at, final_weights, random_batch, run_script, scalars
from reference import adam, cql_loss, dqn_targets, finite_difference
from test_replay_data import PADDING, write_file

import eaudecql_atari
import eaudedqn_atari
import polyprune_cql_atari
import polyprune_dqn_atari

ROOT = Path(__file__).parent.parent
BOTH = pytest.mark.parametrize("script", [eaudecql_atari, polyprune_cql_atari], ids=["eaudecql", "polyprune_cql"])


def test_defaults_are_those_of_the_papers_tables():
    offline = dict(total_timesteps=50 * 62_500, epoch_steps=62_500, target_period=2_000, batch_size=32, gamma=0.99)
    offline |= dict(
        learning_rate=5e-5, adam_epsilon=3.125e-4, cql_alpha=0.1, features=(32, 64, 64, 512), horizon=27_000
    )
    offline |= dict(kept_rows=2_500_000 // 50, files_in_memory=5, eval_epsilon=0.01)
    eaude = offline | dict(n_networks=5, tournament_size=3, max_noise=3.0, max_speed=0.01)
    polyprune = offline | dict(final_sparsity=0.95, pruning_power=3, pruning_start=0.2, pruning_end=0.8)
    assert eaude.items() <= dataclasses.asdict(eaudecql_atari.Args()).items()
    assert (polyprune | dict(pruning_period=1_000)).items() <= dataclasses.asdict(polyprune_cql_atari.Args()).items()


def tiny_agent(script, **flags):
    if script in (eaudecql_atari, eaudedqn_atari):
        flags |= dict(n_networks=2, tournament_size=1)
    args = script.Args(features=TINY, learning_rate=1e-2, gamma=0.9, **flags)
    network = script.QNetwork(TINY, 3)
    state = script.init_agent(args, network, jax.random.key(0))
    target = jax.tree.map(lambda x: x[0], script.init_agent(args, network, jax.random.key(7)).params)
    if script in (polyprune_cql_atari, polyprune_dqn_atari):
        target = script.init_agent(args, network, jax.random.key(7)).params
    return args, network, state._replace(target_params=target)


def networks_of(script, state):
    params = jax.device_get(state.params)
    return [params] if script is polyprune_cql_atari else [at(params, k) for k in range(2)]


@BOTH
def test_update_agrees_with_finite_differences_for_all_networks(script):
    args, network, state = tiny_agent(script, cql_alpha=0.7)
    rng = np.random.default_rng(0)
    batch, target = random_batch(rng), jax.device_get(state.target_params)
    before = networks_of(script, state)
    state, metrics = jax.jit(functools.partial(script.learn, args, network))(state, batch)
    loss = functools.partial(cql_loss, batch=batch, targets=dqn_targets(target, batch, 0.9), alpha=0.7)
    losses = [loss(params) for params in before]
    assert metrics["losses/cql_loss"] == pytest.approx(np.mean(losses), rel=1e-4)
    if script is eaudecql_atari:  # the tournament is decided by the whole loss
        np.testing.assert_allclose(state.cumulated_losses, losses, rtol=1e-4)
    for old, new in zip(before, networks_of(script, state)):
        for layer, name in [(layer, name) for layer in old["params"] for name in ("kernel", "bias")]:
            for _ in range(3):
                index = tuple(rng.integers(old["params"][layer][name].shape))
                change = adam([finite_difference(loss, old, layer, name, index)], 1e-2, args.adam_epsilon)
                value = old["params"][layer][name][index] + change
                assert new["params"][layer][name][index] == pytest.approx(value, abs=3e-4)


@BOTH
def test_without_alpha_the_loss_is_that_of_dqn(script):
    dqn = eaudedqn_atari if script is eaudecql_atari else polyprune_dqn_atari
    batch = random_batch(np.random.default_rng(0))
    _, plain = dqn.learn(*tiny_agent(dqn), batch)
    learn = jax.jit(script.learn, static_argnums=(0, 1))
    losses = [learn(*tiny_agent(script, cql_alpha=alpha), batch)[1]["losses/cql_loss"] for alpha in (0.0, 0.1)]
    assert losses[0] == pytest.approx(float(plain["losses/td_loss"]), rel=1e-5)
    assert losses[1] > losses[0]


@BOTH
def test_pruned_weights_stay_zero_through_updates(script):
    args, network, state = tiny_agent(script)
    masks = jax.tree.map(lambda x: np.random.default_rng(1).random(x.shape) < 0.5, state.masks)
    state = state._replace(params=jax.tree.map(np.multiply, state.params, masks), masks=masks)
    batches = jax.tree.map(lambda x: x[None], random_batch(np.random.default_rng(0)))
    for _ in range(3):
        state, _ = script.learn_many(args, network, state, batches)
    for x, mask in zip(jax.tree.leaves(state.params), jax.tree.leaves(masks)):
        assert not np.asarray(x)[~mask].any()


@BOTH
def test_many_updates_in_one_call_are_the_same_updates(script):
    args, network, state = tiny_agent(script)
    rng = np.random.default_rng(0)
    batches = [random_batch(rng) for _ in range(3)]
    one_by_one = jax.tree.map(jax.numpy.array, state)
    for batch in batches:
        one_by_one, last = script.learn_many(args, network, one_by_one, jax.tree.map(lambda x: x[None], batch))
    stacked = jax.tree.map(lambda *x: np.stack(x), *batches)
    at_once, metrics = script.learn_many(args, network, state, stacked)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), at_once, one_by_one)
    assert metrics["losses/cql_loss"] == pytest.approx(float(last["losses/cql_loss"]), rel=1e-4)


@BOTH
def test_an_evaluation_is_one_episode_of_each_environment(script, monkeypatch):
    class Countdown:  # environment i ends an episode every i + 1 steps; each step scores 10
        def reset(self, seed):
            self.t = 0
            return np.zeros((4, 4, 84, 84), np.uint8), {}

        def step(self, actions):
            self.t += 1
            ends = self.t % np.arange(1, 5) == 0
            return np.zeros((4, 4, 84, 84), np.uint8), np.full(4, 10), ends & (np.arange(4) % 2 == 0), ends, {}

    monkeypatch.setattr(script, "make_env", lambda env_id, n_envs, horizon: Countdown())
    args, network, state = tiny_agent(script, eval_episodes=4)
    returns = script.evaluate(args, np.random.default_rng(0), network, state.target_params)
    assert returns.tolist() == [10, 20, 30, 40]


@BOTH
def test_a_run_that_diverges_stops_with_a_message_at_its_next_target_update(script, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    write_file(tmp_path / "data", 0, [(np.zeros((84, 84)), 0, np.nan, False)] * 9)
    flags = dict(runs_dir=tmp_path, dataset_dir=tmp_path / "data", features=TINY, batch_size=2, target_period=3)
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.Args(**flags, total_timesteps=10, epoch_steps=10))
    assert exit_info.value.code == 2
    who = "all networks have" if script is eaudecql_atari else "the network has"
    assert capsys.readouterr().err == f"error: {who} diverged by step 3; try a lower --learning-rate\n"


def record_catch(folder, n_steps, share_of_random_actions):
    """Play with a mediocre policy; its mean return."""
    rng, game, rows, returns = np.random.default_rng(0), Catch(0), [PADDING] * 3, []
    observation = game.new_episode()
    for _ in range(n_steps):
        action = rng.integers(3) if rng.random() < share_of_random_actions else game.best_action()
        next_observation, reward, done = game.step(action)
        rows.append((observation[-1], action, reward, done))
        rows += [PADDING] * 3 if done else []
        returns += [reward] if done else []
        observation = next_observation
    folder.mkdir()
    for number, first in enumerate(range(0, len(rows), 600)):
        write_file(folder, number, rows[first : first + 600])
    return np.mean(returns)


@pytest.fixture
def catch(monkeypatch, tmp_path):
    for script in (eaudecql_atari, polyprune_cql_atari):
        monkeypatch.setattr(script, "make_env", lambda env_id, n_envs, horizon: CatchEnv(n_envs))
    flags = dict(runs_dir=tmp_path / "runs", dataset_dir=tmp_path / "data", features=(8, 8, 8, 64), target_period=50)
    return flags | dict(gamma=0.9, learning_rate=1e-3, eval_episodes=50)


@pytest.mark.slow
@BOTH
def test_offline_learning_beats_the_policy_that_made_the_data(script, catch):
    recorded = record_catch(catch["dataset_dir"], 3_600, 0.7)
    assert recorded < 0
    own = (
        dict(n_networks=3, max_speed=0.05) if script is eaudecql_atari else dict(final_sparsity=0.7, pruning_period=25)
    )
    folder = script.train(script.Args(**catch, **own, total_timesteps=1_500, epoch_steps=500))
    curves = scalars(folder)
    assert [step for step, _ in curves["eval/episodic_return"]] == [500, 1_000, 1_500]
    assert curves["eval/episodic_return"][-1][1] > recorded + 0.8
    assert max(values[-1][1] for tag, values in curves.items() if tag.startswith("sparsity/network")) > 0.05
    updates = [step for step, _ in curves["sparsity/target"]]
    assert updates == list(range(50, 1_501, 50))  # t counts gradient steps
    if script is polyprune_cql_atari:
        assert curves["sparsity/target"][-1][1] == pytest.approx(0.7)


@pytest.mark.slow
@BOTH
def test_seeds_decide_everything(script, catch):
    record_catch(catch["dataset_dir"], 1_300, 0.7)
    catch |= dict(features=TINY, eval_episodes=3, files_in_memory=1, total_timesteps=150, epoch_steps=50)
    weights = [final_weights(script.train(script.Args(**catch, seed=seed))) for seed in (3, 3, 4)]
    assert_trees_equal(weights[0], weights[1])
    assert any((x != y).any() for x, y in zip(jax.tree.leaves(weights[0]), jax.tree.leaves(weights[2])))


@pytest.mark.slow
def test_from_nothing_to_an_offline_agent_in_four_commands(tmp_path):
    small, data = " --env-id Pong --features 4 4 4 8", tmp_path / "data"
    flags = "--final-sparsity 0 --total-timesteps 400 --learning-starts 300 --buffer-size 400"
    result = run_script(polyprune_dqn_atari, flags + small, tmp_path / "a")
    assert (result.returncode, result.stderr) == (0, "")
    (policy,) = tmp_path.glob("a/*/policy.npz")
    play = f"{policy} --episodes 1 --horizon 200 --record-dir {data} --record-rows 150"
    for flags, n_files in ((play, 2), (f"{play} --epsilon 1", 4)):
        command = [sys.executable, str(ROOT / "play_policy.py"), *flags.split()]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (result.returncode, result.stderr) == (0, "")
        assert len(list(data.iterdir())) == 4 * n_files
    flags = f"--dataset-dir {data} --total-timesteps 40 --epoch-steps 20 --target-period 10 --horizon 60"
    for script, folder in ((eaudecql_atari, "b"), (polyprune_cql_atari, "c")):
        result = run_script(script, flags + " --eval-episodes 2" + small, tmp_path / folder)
        assert (result.returncode, result.stderr) == (0, "")
        (run,) = (tmp_path / folder).iterdir()
        curves = scalars(run)
        assert [step for step, _ in curves["eval/episodic_return"]] == [20, 40]
        assert all(value == int(value * 2) / 2 for _, value in curves["eval/episodic_return"])
        assert [step for step, _ in curves["sparsity/target"]] == [10, 20, 30, 40]
        assert "40/40 steps" in result.stdout
