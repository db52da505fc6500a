"""PolyPruneDQN, dense DQN and DistillDQN: the schedule, one update, the order of events, and whole runs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from catch import CatchEnv
from common import TINY, assert_trees_equal, final_weights, random_batch, record_calls, run_script, scalars
from reference import adam, dqn_loss, dqn_targets, finite_difference, q_values

import eaudedqn_atari
import polyprune_dqn_atari as script
from polyprune_dqn_atari import Args, QNetwork, magnitude_masks, polynomial_sparsity, sparsity_of


def tiny_agent(sparsity=0.0, **flags):
    args = Args(features=TINY, **flags)
    network = QNetwork(args.features, 3)
    state = jax.device_get(script.init_agent(args, network, jax.random.key(0)))
    masks = magnitude_masks(state.params, sparsity, "uniform")
    params = jax.tree.map(np.multiply, state.params, masks)
    return args, network, jax.device_put(state._replace(params=params, masks=masks, sparsity=sparsity))


# ---- Settings and the schedule ----


def test_defaults_are_those_of_the_paper_and_shared_ones_those_of_eaudedqn():
    defaults = dataclasses.asdict(Args())
    schedule = dict(final_sparsity=0.95, pruning_power=3, pruning_start=0.2, pruning_end=0.8, pruning_period=4_000)
    assert schedule.items() <= defaults.items()
    shared = dataclasses.asdict(eaudedqn_atari.Args())
    assert {name: defaults[name] for name in shared.keys() & defaults.keys()}.items() <= shared.items()


@pytest.mark.parametrize(
    ("step", "power", "expected"),
    [
        (0, 3, 0.0),  # before the start
        (200, 3, 0.0),
        (350, 3, 0.95 * (1 - 0.75**3)),
        (500, 1, 0.95 * 0.5),
        (500, 2, 0.95 * 0.75),
        (500, 3, 0.95 * 0.875),
        (799, 3, 0.95 * (1 - (1 / 600) ** 3)),
        (800, 3, 0.95),
        (1_000, 3, 0.95),  # after the end
        (5_000, 3, 0.95),
    ],
)
def test_equation_2(step, power, expected):
    assert polynomial_sparsity(step, 1_000, 0.95, 0.2, 0.8, power) == pytest.approx(expected)


def test_equation_2_over_the_whole_run_and_in_one_step():
    assert polynomial_sparsity(0, 100, 0.9, 0.0, 1.0, 3) == 0
    assert polynomial_sparsity(100, 100, 0.9, 0.0, 1.0, 3) == 0.9
    assert polynomial_sparsity(50, 100, 0.9, 0.5, 0.5, 3) == 0  # start and end together: a jump, no division by zero
    assert polynomial_sparsity(51, 100, 0.9, 0.5, 0.5, 3) == 0.9


# ---- One update and one pruning ----


@pytest.mark.parametrize("sparsity", [0.0, 0.5])
def test_update_agrees_with_finite_differences(sparsity):
    args, network, state = tiny_agent(sparsity, learning_rate=1e-2, gamma=0.9)
    target = jax.device_get(script.init_agent(args, network, jax.random.key(7)).params)
    state = state._replace(target_params=jax.tree.map(jax.numpy.array, target))
    rng = np.random.default_rng(0)
    batches, states, losses = [random_batch(rng), random_batch(rng)], [jax.device_get(state)], []
    for batch in batches:
        state, metrics = script.learn(args, network, state, batch)
        states.append(jax.device_get(state))
        losses.append(float(metrics["losses/td_loss"]))

    targets = [dqn_targets(target, batch, 0.9) for batch in batches]
    networks = [s.params for s in states]
    assert losses == pytest.approx([dqn_loss(*x) for x in zip(networks, batches, targets)], rel=1e-4)
    chosen = q_values(networks[1], batches[1].frames[:, :-1])[np.arange(6), batches[1].actions]
    assert metrics["losses/q_values"] == pytest.approx(chosen.mean(), rel=1e-3)
    functions = [functools.partial(dqn_loss, batch=b, targets=t) for b, t in zip(batches, targets)]
    for layer, name in [(layer, name) for layer in networks[0]["params"] for name in ("kernel", "bias")]:
        for _ in range(6):
            index = tuple(rng.integers(networks[0]["params"][layer][name].shape))
            gradients = [finite_difference(f, p, layer, name, index) for f, p in zip(functions, networks)]
            values = [p["params"][layer][name][index] for p in networks]
            kept = states[0].masks["params"][layer][name][index]
            for i in range(2):
                change = adam(gradients[: i + 1], 1e-2, args.adam_epsilon)
                assert values[i + 1] == pytest.approx((values[i] + change) * kept, abs=3e-4)


def test_pruned_weights_stay_exactly_zero_and_the_others_learn():
    args, network, state = tiny_agent(0.7, learning_rate=1e-3)
    start, rng = jax.device_get(state), np.random.default_rng(0)
    for _ in range(300):
        state, _ = script.learn(args, network, state, random_batch(rng))
    changed = []
    for new, old, mask in zip(*map(jax.tree.leaves, (state.params, start.params, start.masks))):
        assert not np.asarray(new)[~mask].any()
        changed.extend((np.asarray(new) != old)[mask])
    assert np.mean(changed) > 0.5
    assert_trees_equal(state.target_params, start.target_params)


def test_pruning_masks_the_smallest_weights_and_nothing_else():
    flags = dict(total_timesteps=1_000, learning_starts=50, sparsity_distribution="uniform")
    args, network, state = tiny_agent(**flags)
    for _ in range(3):
        state, _ = script.learn(args, network, state, random_batch(np.random.default_rng(0)))
    before = jax.device_get(state)
    after = jax.device_get(script.prune(args, state, 500))
    assert after.sparsity == pytest.approx(0.95 * 0.875)
    assert_trees_equal(after.masks, magnitude_masks(before.params, 0.95 * 0.875, "uniform"))
    assert_trees_equal(after.params, jax.tree.map(np.multiply, before.params, after.masks))
    assert_trees_equal((after.opt_state, after.target_params), (before.opt_state, before.target_params))


# ---- Whole runs ----


@pytest.fixture
def catch(monkeypatch, tmp_path):
    """Flags of a short run of the tiny game in place of the emulator."""
    monkeypatch.setattr(script, "make_env", lambda env_id, n_envs, horizon: CatchEnv(n_envs))
    flags = dict(runs_dir=tmp_path, features=(8, 8, 8, 32), target_period=100, pruning_period=50, learning_starts=500)
    return flags | dict(buffer_size=5_000, gamma=0.9, learning_rate=1e-3, epsilon_duration=3_000)


@pytest.mark.slow
@pytest.mark.parametrize("sparsity", [0.0, 0.9])
def test_the_tiny_game_is_learned_dense_and_sparse(catch, sparsity):
    catch |= dict(features=(8, 8, 8, 64), pruning_period=100)
    curves = scalars(script.train(Args(**catch, total_timesteps=6_000, final_sparsity=sparsity)))
    returns = [value for _, value in curves["charts/episodic_return"]]
    assert np.mean(returns[:80]) < -0.3
    assert np.mean(returns[-80:]) > 0.9
    assert curves["sparsity/target"][-1] == (6_000, pytest.approx(sparsity))


def test_masks_follow_the_schedule_and_never_lose_a_zero(catch, monkeypatch):
    calls = record_calls(script, monkeypatch, ["learn", "prune"])
    catch |= dict(features=TINY, learning_starts=40, pruning_period=20, target_period=40)
    script.train(Args(**catch, total_timesteps=200))
    prunings = [call for call in calls if call[0] == "prune"]
    assert [step for _, step, *_ in prunings] == list(range(20, 201, 20))
    assert [step for name, step, *_ in calls if name == "learn"] == list(range(43, 201, 4))
    for _, step, before, after in prunings:
        assert after.sparsity == pytest.approx(polynomial_sparsity(step, 200, 0.95, 0.2, 0.8, 3))
        assert sparsity_of(after.masks) == pytest.approx(after.sparsity, abs=0.05)  # tiny tensors
        assert_trees_equal(jax.tree.map(lambda new, old: (new & ~old).any(), after.masks, before.masks), FALSE)
        assert_trees_equal(jax.tree.map(lambda x, mask: x[~mask].any(), after.params, after.masks), FALSE)
    assert prunings[-1][3].sparsity == np.float32(0.95)


FALSE = {
    "params": {
        layer: {"kernel": False, "bias": False} for layer in ("Conv_0", "Conv_1", "Conv_2", "Dense_0", "Dense_1")
    }
}


def test_in_distilldqn_the_target_holds_the_weights_from_before_the_pruning(catch, monkeypatch):
    calls = record_calls(script, monkeypatch, ["prune"])
    catch |= dict(features=TINY, learning_starts=40, target_period=40, pruning_period=40)
    curves = scalars(script.train(Args(**catch, total_timesteps=200)))
    for _, step, before, after in calls:
        assert_trees_equal(after.target_params, before.params)
        assert dict(curves["sparsity/target"])[step] == before.sparsity
        assert dict(curves["sparsity/network"])[step] == pytest.approx(after.sparsity)
    assert calls[3][3].sparsity > calls[3][2].sparsity > 0


def test_dense_dqn_never_masks(catch, monkeypatch):
    calls = record_calls(script, monkeypatch, ["prune"])
    catch |= dict(features=TINY, learning_starts=40)
    script.train(Args(**catch, total_timesteps=200, final_sparsity=0.0))
    assert len(calls) == 4
    for *_, before, after in calls:
        assert all(mask.all() for mask in jax.tree.leaves(after.masks))
        assert_trees_equal(after.params, before.params)


def test_seeds_decide_everything(catch):
    catch |= dict(features=TINY, learning_starts=100, epsilon_duration=300, total_timesteps=1_000)
    runs = [script.train(Args(**catch, seed=seed)) for seed in (3, 3, 4)]
    weights, curves = [final_weights(run) for run in runs], [scalars(run) for run in runs]
    assert_trees_equal(weights[0], weights[1])
    assert all((x != y).any() for x, y in zip(jax.tree.leaves(weights[0]), jax.tree.leaves(weights[2])))
    for tag in curves[0].keys() - {"charts/SPS"}:
        assert curves[0][tag] == curves[1][tag]
    assert curves[0]["charts/episodic_return"] != curves[2]["charts/episodic_return"]


def test_run_stops_with_a_message_when_the_network_diverges(catch, monkeypatch, capsys):
    env = CatchEnv()
    env.step = lambda actions: (np.zeros((1, 4, 84, 84), np.uint8), np.array([np.nan]), *np.zeros((2, 1), bool), {})
    monkeypatch.setattr(script, "make_env", lambda env_id, n_envs, horizon: env)
    with pytest.raises(SystemExit) as exit_info:
        script.train(Args(**catch | dict(features=TINY, learning_starts=40), total_timesteps=100))
    assert exit_info.value.code == 2
    assert "the network has diverged by step 100" in capsys.readouterr().err


def test_a_short_run_of_pong_logs_everything(tmp_path):
    flags = "--env-id Pong --total-timesteps 1200 --learning-starts 200 --target-period 200 --pruning-period 100"
    result = run_script(script, flags + " --buffer-size 500 --horizon 350 --features 4 4 4 8", tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("Pong__polyprune_dqn_atari__1__")
    curves = scalars(folder)
    charts = [f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "epsilon")]
    assert set(curves) == {*charts, "losses/td_loss", "losses/q_values", "sparsity/target", "sparsity/network"}
    assert curves["charts/episodic_length"] == [(350, 350), (700, 350), (1_050, 350)]
    assert [step for step, _ in curves["sparsity/network"]] == list(range(100, 1_201, 100))
    assert curves["sparsity/target"][-1] == (1_200, pytest.approx(0.95))
    assert "sparsity=0.95" in result.stdout


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(final_sparsity=1.1), "--final-sparsity must be from 0 to 0.999, not 1.1"),
        (dict(final_sparsity=-0.1), "--final-sparsity must be from 0 to 0.999, not -0.1"),
        (dict(pruning_start=0.5, pruning_end=0.4), "--pruning-end must be from 0.5 to 1"),
        (dict(pruning_start=-0.1), "--pruning-start must be from 0 to 1, not -0.1"),
        (dict(pruning_end=1.1), "--pruning-end must be from 0.2 to 1"),
        (dict(pruning_period=0), "--pruning-period must be from 1 to inf, not 0"),
        (dict(pruning_power=0), "--pruning-power must be from 1 to inf, not 0"),
        (dict(env_id="Brekout"), "unknown Atari game 'Brekout'; the closest names are Breakout"),
    ],
)
def test_wrong_input_gets_one_message_and_leaves_nothing(flags, message, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        script.train(Args(**dict(runs_dir=tmp_path, buffer_size=1_000, features=TINY) | flags))
    assert exit_info.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
