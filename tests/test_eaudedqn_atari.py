"""EauDeDQN: the environment, one update, the population step, and whole runs."""

import dataclasses
import json
import os
import re
import signal
from pathlib import Path

import gymnasium
import jax
import numpy as np
import pytest
from catch import CatchEnv
from common import (
    TINY,
    assert_trees_equal,
    at,
    final_weights,
    random_batch,
    record_calls,
    run_script,
    scalars,
    stop_script,
)
from reference import adam, dqn_loss, dqn_targets, finite_difference, q_values

import eaudedqn_atari as script
from eaudedqn_atari import Args, QNetwork


def tiny_agent(seed=0, **flags):
    """A tiny population whose networks are pruned to different sparsities, as in the middle of a run."""
    args = Args(features=TINY, **flags)
    network = QNetwork(args.features, 3)
    state = jax.device_get(script.init_agent(args, network, jax.random.key(seed)))
    sparsities = np.linspace(0, 0.6, args.n_networks).astype(np.float32)
    masks = [script.magnitude_masks(at(state.params, k), s, "uniform") for k, s in enumerate(sparsities)]
    masks = jax.tree.map(lambda *x: np.stack(x), *masks)
    params = jax.tree.map(np.multiply, state.params, masks)
    return args, network, jax.device_put(state._replace(params=params, masks=masks, sparsities=sparsities))


# ---- Settings and environment ----


def test_defaults_are_those_of_the_papers_tables():
    expected = dict(total_timesteps=40 * 250_000, horizon=27_000, features=(32, 64, 64, 512), n_networks=5)
    expected |= dict(tournament_size=3, max_noise=3.0, max_speed=0.01, target_period=8_000, gradient_period=4)
    expected |= dict(learning_starts=20_000, buffer_size=1_000_000, batch_size=32, gamma=0.99, learning_rate=6.25e-5)
    expected |= dict(adam_epsilon=1.5e-4, epsilon_end=0.01, epsilon_duration=250_000)
    assert expected.items() <= dataclasses.asdict(Args()).items()


@pytest.mark.parametrize(("hidden", "count"), [(32, 326_022), (512, 4_046_502), (2048, 15_952_038)])
def test_parameter_counts_of_the_papers_table(hidden, count):
    n_actions = int(script.make_env("SpaceInvaders", 1, 10).single_action_space.n)
    network = QNetwork((32, 64, 64, hidden), n_actions)
    shapes = jax.eval_shape(network.init, jax.random.key(0), np.zeros((1, 4, 84, 84), np.uint8))
    assert sum(x.size for x in jax.tree.leaves(shapes)) == count


def test_networks_start_independently_from_xavier_uniform_kernels():
    state = script.init_agent(Args(features=(4, 8, 8, 64)), QNetwork((4, 8, 8, 64), 6), jax.random.key(0))
    for layer in state.params["params"].values():
        kernels, bias = layer["kernel"], layer["bias"]
        assert not bias.any()
        fan_in, fan_out = (np.prod(kernels.shape[1:-2]) * n for n in kernels.shape[-2:])
        limit = np.sqrt(6 / (fan_in + fan_out))
        assert 0.9 * limit < np.abs(kernels).max() <= limit
        assert len(np.unique(kernels[:, 0].reshape(5, -1)[:, 0])) == 5
    assert_trees_equal(state.target_params, at(state.params, 0))


@pytest.mark.parametrize("env_id", ["MsPacman", "ALE/MsPacman-v5", "mspacman", "ms_pacman", "MsPacmanNoFrameskip-v4"])
def test_games_go_by_the_names_people_write(env_id):
    assert script.canonical_name(env_id) == "MsPacman"
    assert script.make_env(env_id, 1, 10).single_action_space.n == 9  # the minimal set, not all 18


def test_every_game_has_its_own_name():
    games = [spec.name for spec in gymnasium.registry.values() if spec.namespace == "ALE"]
    assert [script.canonical_name(game) for game in games] == games
    assert "Combat" not in games  # two players, at which the emulator ends the whole program


# ---- One update ----


def test_update_agrees_with_finite_differences_for_all_networks():
    args, network, state = tiny_agent(learning_rate=1e-2, gamma=0.9, n_networks=3)
    target = jax.device_get(script.init_agent(args, network, jax.random.key(7)).target_params)
    state = state._replace(target_params=jax.tree.map(jax.numpy.array, target))
    rng, picks = np.random.default_rng(0), np.random.default_rng(1)
    batches = [random_batch(rng), random_batch(rng)]
    before = [jax.device_get(state)]
    for batch in batches:
        state, metrics = script.learn(args, network, state, batch)
        before.append(jax.device_get(state))

    targets = [dqn_targets(target, batch, 0.9) for batch in batches]
    n_checked = 0
    for k in range(3):
        networks = [at(s.params, k) for s in before]
        masks = at(before[0].masks, k)
        losses = [dqn_loss(*x) for x in zip(networks, batches, targets)]
        assert before[2].cumulated_losses[k] == pytest.approx(sum(losses), rel=1e-4)
        for layer, name in [(layer, name) for layer in networks[0]["params"] for name in ("kernel", "bias")]:
            for _ in range(4):
                index = tuple(picks.integers(networks[0]["params"][layer][name].shape))
                gradients = [
                    finite_difference(
                        lambda p, i=i: dqn_loss(p, batches[i], targets[i]), networks[i], layer, name, index
                    )
                    for i in range(2)
                ]
                values = [p["params"][layer][name][index] for p in networks]
                kept = masks["params"][layer][name][index]
                for i in range(2):
                    change = adam(gradients[: i + 1], 1e-2, args.adam_epsilon)
                    assert values[i + 1] == pytest.approx((values[i] + change) * kept, abs=3e-4)
                n_checked += any(gradients)
    assert n_checked > 60
    losses = [dqn_loss(at(before[1].params, k), batches[1], targets[1]) for k in range(3)]
    assert metrics["losses/td_loss"] == pytest.approx(np.mean(losses), rel=1e-4)


def test_vmap_and_loop_over_networks_agree(monkeypatch):
    _, network, state = tiny_agent()
    batch = random_batch(np.random.default_rng(0))

    def loss(params):
        q_values = script.population_q_values(network, params, batch.frames[:, :-1])
        return jax.numpy.square(q_values - 1).mean(), q_values

    loop = jax.value_and_grad(loss, has_aux=True)(state.params)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    vmap = jax.value_and_grad(loss, has_aux=True)(state.params)
    assert loop[0][1].shape == (5, 6, 3)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), loop, vmap)


def test_pruned_weights_stay_exactly_zero_and_the_others_learn():
    args, network, state = tiny_agent(learning_rate=1e-3)
    start, rng = jax.device_get(state), np.random.default_rng(0)
    for _ in range(300):
        state, _ = script.learn(args, network, state, random_batch(rng))
    for new, old, mask in zip(*map(jax.tree.leaves, (state.params, start.params, start.masks))):
        assert not np.asarray(new)[~mask].any()
        assert (np.asarray(new) != old)[mask].mean() > 0.5
    assert_trees_equal(state.masks, start.masks)
    assert_trees_equal(state.target_params, start.target_params)
    assert state.opt_state[0].count.tolist() == [300] * 5


def test_a_diverged_network_has_infinite_loss_and_leaves_the_others_alone():
    args, network, state = tiny_agent()
    healthy, _ = script.learn(
        args, network, jax.tree.map(jax.numpy.array, state), random_batch(np.random.default_rng(0))
    )
    broken = state._replace(params=jax.tree.map(lambda x: x.at[2].set(np.nan), state.params))
    broken, _ = script.learn(args, network, broken, random_batch(np.random.default_rng(0)))
    others = [0, 1, 3, 4]
    assert broken.cumulated_losses[2] == np.inf
    assert_trees_equal(at(broken.params, np.array(others)), at(healthy.params, np.array(others)))
    parents = script.select_population(np.random.default_rng(0), broken.cumulated_losses, 3)
    assert 2 not in parents
    replaced = script.prune_copies(args, np.random.default_rng(0), broken, parents, 8_000)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((replaced.params, replaced.opt_state)))


# ---- The population step ----


def learned_population():
    flags = dict(target_period=100, total_timesteps=1_000, max_speed=0.5, sparsity_distribution="uniform")
    args, network, state = tiny_agent(**flags)
    rng = np.random.default_rng(0)
    for _ in range(3):
        state, _ = script.learn(args, network, state, random_batch(rng))
    return args, network, state


@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])
def test_copies_are_pruned_with_new_optimizers_and_survivors_are_untouched(distribution):
    args, _, state = learned_population()
    args = dataclasses.replace(args, sparsity_distribution=distribution)
    before = jax.device_get(state)
    parents = np.array([1, 1, 2, 3, 1])  # network 1 replaces 0 and 4
    state = jax.device_get(script.prune_copies(args, np.random.default_rng(5), state, parents, 400))

    for k in (1, 2, 3):
        for field in ("params", "opt_state", "masks"):
            assert_trees_equal(at(getattr(state, field), k), at(getattr(before, field), k))
        assert state.sparsities[k] == before.sparsities[k]
        assert state.opt_state[0].count[k] == 3
    parent, rng = at(before.params, 1), np.random.default_rng(5)
    for k in (0, 4):
        sparsity = script.next_sparsity(before.sparsities[1], rng.uniform(0, 3), 400, 500, 1_000, 0.5)
        assert sparsity > before.sparsities[1]
        assert state.sparsities[k] == pytest.approx(sparsity)
        masks = at(state.masks, k)
        assert_trees_equal(masks, script.magnitude_masks(parent, sparsity, distribution))
        assert_trees_equal(at(state.params, k), jax.tree.map(np.multiply, parent, masks))
        fresh = script.make_optimizer(args).init(parent)
        assert_trees_equal(at(state.opt_state, k), fresh)
    assert state.sparsities[0] != state.sparsities[4]  # each copy has its own draw
    assert_trees_equal(state.target_params, before.target_params)


def test_pruned_weights_never_return_over_generations():
    args, network, state = learned_population()
    rng = np.random.default_rng(0)
    for step in range(100, 1_001, 100):
        before, parents = jax.device_get(state), script.select_population(rng, rng.random(5), 3)
        state = script.prune_copies(args, rng, state, parents, step)
        state, _ = script.learn(args, network, state, random_batch(rng))
        for k, parent in enumerate(parents):
            masks = at(jax.device_get(state.masks), k)
            regrown = jax.tree.map(lambda new, old: (new & ~old).any(), masks, at(before.masks, parent))
            assert not any(jax.tree.leaves(regrown))
            assert script.sparsity_of(masks) == pytest.approx(float(state.sparsities[k]), abs=0.02)
    assert min(state.sparsities) > 0.5


def test_the_behaviour_network_chooses_the_action():
    _, network, state = tiny_agent()
    observations = np.random.default_rng(0).integers(0, 256, (1, 4, 84, 84), dtype=np.uint8)
    actions = [int(script.behaviour_actions(network, state.params, k, observations)[0]) for k in range(5)]
    networks = [at(jax.device_get(state.params), k) for k in range(5)]
    assert actions == [q_values(params, observations)[0].argmax() for params in networks]
    assert len(set(actions)) > 1


# ---- Whole runs ----


@pytest.fixture
def catch(monkeypatch, tmp_path):
    """Flags of a short run of the tiny game in place of the emulator."""
    monkeypatch.setattr(script, "make_env", lambda env_id, n_envs, horizon: CatchEnv(n_envs))
    flags = dict(runs_dir=tmp_path, features=(8, 8, 8, 32), n_networks=3, tournament_size=2, target_period=100)
    return flags | dict(learning_starts=500, buffer_size=5_000, gamma=0.9, learning_rate=1e-3, epsilon_duration=3_000)


@pytest.mark.slow
def test_the_tiny_game_is_learned_while_sparsity_grows(catch):
    folder = script.train(Args(**catch, total_timesteps=5_000, max_speed=0.05))
    curves = scalars(folder)
    returns = [value for _, value in curves["charts/episodic_return"]]
    assert np.mean(returns[:80]) < -0.3
    assert np.mean(returns[-80:]) > 0.9
    sparsity = np.array(curves["sparsity/target"])
    assert sparsity[:, 0].tolist() == [*range(600, 5_001, 100)]
    assert sparsity[-1, 1] > 0.05
    assert max(values[-1][1] for tag, values in curves.items() if tag.startswith("sparsity/network")) <= 1


def test_no_target_update_before_the_first_gradient_step(catch, monkeypatch):
    calls = record_calls(script, monkeypatch, ["learn", "prune_copies"])
    catch |= dict(features=TINY, learning_starts=41, target_period=6, gradient_period=4)
    script.train(Args(**catch, total_timesteps=54))  # step 42 passes, step 44 is the first to learn
    expected = [("learn", 43), ("learn", 47), ("prune_copies", 48), ("learn", 51), ("prune_copies", 54)]
    assert [(name, step) for name, step, *_ in calls] == expected


def test_actions_come_from_networks_drawn_by_their_losses_and_from_epsilon(catch, monkeypatch):
    drawn, acted = [], []

    def losses_to_probabilities(losses):
        drawn.append(np.array(losses))
        return np.array([0.0, 0.0, 1.0])  # network 2 always

    def actions_of(network, params, idx, observations):
        acted.append(idx)
        return np.array([0])

    monkeypatch.setattr(script, "network_probabilities", losses_to_probabilities)
    monkeypatch.setattr(script, "behaviour_actions", actions_of)
    script.train(Args(**catch | dict(features=TINY, learning_starts=40, epsilon_duration=500), total_timesteps=1_000))
    assert set(acted) == {2}
    assert len(drawn) == 1_000  # a draw at each step
    assert not np.any(drawn[:40])
    assert np.all(drawn[-1] > 0)
    # Epsilon falls from 1 to 0.01 over 500 steps: about 252 of the first 500 actions are greedy, 495 of the others.
    assert 700 < len(acted) < 790


def test_without_noise_all_networks_stay_dense(catch, monkeypatch):
    calls = record_calls(script, monkeypatch, ["prune_copies"])
    catch |= dict(features=TINY, learning_starts=40, target_period=20)
    script.train(Args(**catch, total_timesteps=200, max_noise=0.0))
    assert len(calls) == 8
    assert all(not after.sparsities.any() and all(m.all() for m in jax.tree.leaves(after.masks)) for *_, after in calls)
    assert any((after.opt_state[0].count == 0).any() for *_, after in calls)  # yet losers are replaced


def results(args):
    run = script.train(args)
    return final_weights(run), {tag: values for tag, values in scalars(run).items() if tag != "charts/SPS"}


@pytest.mark.slow
def test_seeds_decide_everything(catch):
    catch |= dict(features=TINY, learning_starts=100, epsilon_duration=300, total_timesteps=1_000)
    first, curves = results(Args(**catch, seed=3))
    again, curves_again = results(Args(**catch, seed=3))
    other, other_curves = results(Args(**catch, seed=4))
    assert_trees_equal(first, again)
    assert curves == curves_again
    assert all((x != y).any() for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(other)))
    assert curves["charts/episodic_return"] != other_curves["charts/episodic_return"]


def test_run_stops_with_a_message_when_all_networks_diverge(catch, monkeypatch, capsys):
    env = CatchEnv()
    env.step = lambda actions: (np.zeros((1, 4, 84, 84), np.uint8), np.array([np.nan]), *np.zeros((2, 1), bool), {})
    monkeypatch.setattr(script, "make_env", lambda env_id, n_envs, horizon: env)
    with pytest.raises(SystemExit) as exit_info:
        script.train(Args(**catch | dict(features=TINY, learning_starts=40), total_timesteps=100))
    assert exit_info.value.code == 2
    assert "all networks have diverged by step 100" in capsys.readouterr().err


PONG = "--env-id Pong --total-timesteps 1200 --learning-starts 200 --target-period 200 --buffer-size 500 --horizon 350"
PONG += " --features 4 4 4 8 --n-networks 3 --max-speed 0.1"


@pytest.mark.slow
def test_a_short_run_of_pong_logs_everything(tmp_path):
    result = run_script(script, PONG, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")  # no warnings
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith("Pong__eaudedqn_atari__1__")
    assert json.loads((folder / "args.json").read_text())["features"] == [4, 4, 4, 8]

    curves = scalars(folder)
    names = "losses/cumulated", "sparsity/network", "population/parent"
    per_network = [f"{name}_{k}" for name in names for k in range(3)]
    charts = [f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS", "epsilon")]
    single = ["losses/td_loss", "losses/q_values", "sparsity/target", "population/distinct"]
    assert set(curves) == {*charts, *per_network, *single}
    assert curves["charts/episodic_length"] == [(350, 350), (700, 350), (1_050, 350)]
    assert all(-21 <= value < 0 for _, value in curves["charts/episodic_return"])
    assert curves["charts/epsilon"] == [(1_000, pytest.approx(1 - 0.99 * 1_000 / 250_000))]
    for tag in per_network:
        assert [step for step, _ in curves[tag]] == [400, 600, 800, 1_000, 1_200]
    assert all(value > 0 for k in range(3) for _, value in curves[f"losses/cumulated_{k}"])
    assert max(curves[f"sparsity/network_{k}"][-1][1] for k in range(3)) > 0

    lines = result.stdout.splitlines()
    assert lines[0] == f"Run folder {folder}, on the CPU, after 0 steps"
    assert re.search(r"1,200/1,200 steps, .* steps/s, 00:00 left, return=-\d+, sparsity=0\.\d", result.stdout)
    kernels = [x for name, x in final_weights(folder).items() if name.endswith("kernel")]
    counts = f"{sum(map(np.count_nonzero, kernels)):,} of {sum(x.size for x in kernels):,} weights"
    assert f"Finished after 1,200 steps, with {counts}" in lines
    player = os.path.relpath(Path(script.__file__).with_name("play_policy.py"))
    assert lines[-2:] == [f"python {player} {folder}", f"tensorboard --logdir {tmp_path}"]


def test_in_python_a_fraction_may_be_a_whole_number(capsys):
    script.check_args(Args(max_noise=0, gamma=1))
    with pytest.raises(SystemExit):
        script.check_args(Args(gamma=2))  # by its own kind it would have no upper limit
    assert capsys.readouterr().err == "error: --gamma must be from 0 to 1, not 2\n"


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_the_run_cleanly(signum, code, tmp_path):
    exit_code, output, errors = stop_script(script, PONG.replace("1200", "100_000"), tmp_path, signum)
    assert (exit_code, errors) == (code, "")
    assert "Interrupted after" in output
    assert "tensorboard --logdir" in output


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(env_id="SpaceInvader"), "unknown Atari game 'SpaceInvader'; the closest names are SpaceInvaders"),
        (dict(env_id="CartPole-v1"), "unknown Atari game 'CartPole-v1'"),
        (dict(target_period=0), "--target-period must be from 1 to inf, not 0"),
        (dict(gradient_period=0), "--gradient-period must be from 1 to inf, not 0"),
        (dict(tournament_size=6), "--tournament-size must be from 1 to 5, the value of --n-networks, not 6"),
        (dict(total_timesteps=500), "--learning-starts must be from 1 to 500, the value of --total-timesteps, not 2"),
        (dict(features=(8, 8, 0, 8)), "--features must be from 1 to inf, not (8, 8, 0, 8)"),
        (dict(max_speed=1.5), "--max-speed must be from 0 to 1, not 1.5"),
        (dict(gamma=float("nan")), "--gamma must be from 0 to 1, not nan"),
        (dict(max_noise=-1.0), "--max-noise must be from 0 to 1000000000.0, not -1.0"),
        (dict(seed=-1), "--seed must be from 0 to 2147483647, not -1"),
        (dict(horizon=1), "--horizon must be from 2 to 536870911, not 1"),
        (dict(runs_dir=Path("/dev/null/runs")), "[Errno 20] Not a directory: '/dev/null/runs/Pong__"),
    ],
)
def test_wrong_input_gets_one_message_and_leaves_nothing(flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        script.main(Args(**{"buffer_size": 1_000, "features": TINY} | flags))
    assert exit_info.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("flags", ["--env-id Pongg", "--features 8 8", "--n-networks many", "--no-such-flag 1"])
def test_wrong_input_at_the_command_line_shows_no_traceback(flags, tmp_path):
    result = run_script(script, flags, tmp_path)
    assert result.returncode == 2
    assert "Traceback" not in result.stderr + result.stdout
    assert result.stderr
    assert list(tmp_path.iterdir()) == []
