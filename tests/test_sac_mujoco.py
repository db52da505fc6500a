"""EauDeSAC and PolyPruneSAC: the task, one whole update, the populations, and whole runs."""

import dataclasses
import json
import math
import re
import signal

import gymnasium
import jax
import numpy as np
import pytest
from common import assert_trees_equal, at, final_weights, record_calls, run_script, scalars, stop_script
from mujoco_probe import Probe
from reference import actor_gradients, adam, critic_gradients, critic_values, policy, sac_targets

import eaudesac_mujoco as eaude
import polyprune_sac_mujoco as polyprune

SCRIPTS = pytest.mark.parametrize("script", [eaude, polyprune], ids=["eaudesac", "polyprune_sac"])
N_OBSERVATIONS, N_ACTIONS, BATCH = 3, 2, 7


def tiny_agent(script, seed=0, **flags):
    """Tiny critics that are pruned to different sparsities, with other targets, as in the middle of a run."""
    flags = dict(critic_features=(6, 5), actor_features=(6, 5), batch_size=BATCH, tau=0.1, gamma=0.9) | flags
    args = script.Args(**flags)
    actor, critic = script.Actor(args.actor_features, N_ACTIONS), script.Critic(args.critic_features)
    rng, observation = np.random.default_rng(seed), np.zeros(N_OBSERVATIONS)
    state = jax.device_get(script.init_agent(args, actor, critic, jax.random.key(seed), observation))
    other = jax.device_get(script.init_agent(args, actor, critic, jax.random.key(seed + 1), observation))
    masks, actor_masks = jax.tree.map(  # biases, which start at 0, are never pruned
        lambda x: (rng.random(x.shape) < 0.8) | (x == 0), (state.params, state.actor_params)
    )
    params, actor_params = jax.tree.map(
        lambda x, mask: (x + rng.normal(0, 0.1, x.shape).astype(np.float32)) * mask,
        (state.params, state.actor_params),
        (masks, actor_masks),
    )
    state = state._replace(params=params, masks=masks, actor_params=actor_params, actor_masks=actor_masks)
    state = state._replace(target_params=other.params, log_temperature=np.float32(-0.7))
    if script is eaude:  # the targets are not yet those of the lowest losses
        losses = rng.permuted(np.geomspace([0.1, 0.1], 10, args.n_networks, axis=1), axis=1).astype(np.float32)
        sparsities = np.linspace(0, 0.5, 2 * args.n_networks).reshape(2, -1).astype(np.float32)
        state = state._replace(cumulated_losses=losses, sparsities=sparsities, target_idx=losses.argmax(axis=1))
    return args, actor, critic, state


def random_batches(script, rng, utd=1):
    shape = utd, BATCH
    return script.Transitions(
        observations=rng.normal(size=(*shape, N_OBSERVATIONS)).astype(np.float32),
        actions=rng.uniform(-1, 1, (*shape, N_ACTIONS)).astype(np.float32),
        rewards=rng.normal(size=shape).astype(np.float32),
        next_observations=rng.normal(size=(*shape, N_OBSERVATIONS)).astype(np.float32),
        terminals=(np.arange(utd * BATCH) % 3 == 1).reshape(shape).astype(np.float32),
    )


def learn(script, args, actor, critic, state, batches, with_actor=True):
    """On a copy, since the state is donated. The random numbers are always the same."""
    noise, choices = learning_noise(args), [CHOICES] if script is eaude else []
    draws = script.Draws(batches, noise[:-1], noise[-1], *choices)
    state, metrics = script.learn(args, actor, critic, jax.device_put(state), draws, with_actor)
    return jax.device_get(state), jax.device_get(metrics)


def learning_noise(args):
    return np.random.default_rng(9).standard_normal((args.utd + 1, BATCH, N_ACTIONS), np.float32)


CHOICES = np.array([0.6, 0.95], np.float32)


def drawn_networks(losses, choices):
    """`Choice` of Alg. 2, for each of the two critics."""
    drawn = []
    for x, choice in zip(np.float64(losses), choices):
        weights = 1 / x
        drawn.append(int(np.searchsorted(np.cumsum(weights / weights.sum()), choice, side="right")))
    return drawn


def assert_close(left, right, tolerance):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=0, atol=tolerance), left, right)


# ---- Settings and the task ----


@SCRIPTS
def test_defaults_are_those_of_the_papers_table(script):
    expected = dict(total_timesteps=1_000_000, learning_starts=5_000, buffer_size=1_000_000, utd=1, batch_size=256)
    expected |= dict(learning_rate=1e-3, policy_delay=1, actor_features=(256, 256), critic_features=(256, 256))
    expected |= dict(tau=0.005, gamma=0.99, pruning_period=1_000, eval_period=10_000, eval_episodes=10)
    expected |= dict(actor_final_sparsity=0.0, pruning_power=3, pruning_start=0.2, pruning_end=0.8)
    if script is eaude:
        expected |= dict(n_networks=5, tournament_size=3, max_noise=3.0, max_speed=0.01)
    else:
        expected |= dict(final_sparsity=0.95)
    assert expected.items() <= dataclasses.asdict(script.Args()).items()


@pytest.mark.parametrize(("width", "count"), [(256, 94_984), (1280, 1_785_608), (2048, 4_429_832)])
def test_parameter_counts_of_the_papers_table(width, count):
    env = eaude.make_env("Ant")
    assert (env.observation_space.shape, env.action_space.shape) == ((105,), (8,))
    critic = eaude.Critic((width, width))
    shapes = jax.eval_shape(critic.init, jax.random.key(0), np.zeros(105), np.zeros(8))
    size = sum(x.size for x in jax.tree.leaves(shapes))
    # The paper counted observations in and actions out; a critic has actions in and one value out.
    assert size == count + 8 * width - 7 * (width + 1)


@pytest.mark.parametrize("env_id", ["Ant", "ant", "Ant-v5", "ANT-V5"])
def test_tasks_go_by_the_names_people_write(env_id):
    assert eaude.canonical_name(env_id) == "Ant-v5"


def test_all_tasks_of_the_paper_have_its_horizon():
    for name in ("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "Swimmer", "Walker2d"):
        assert gymnasium.spec(eaude.canonical_name(name)).max_episode_steps == 1_000


def test_every_mujoco_task_can_be_played(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in {spec.name for spec in gymnasium.registry.values() if "gymnasium.envs.mujoco" in str(spec.entry_point)}:
        env = eaude.make_env(name)
        env.reset(seed=0)
        assert np.isfinite(env.step(np.ones(env.action_space.shape))[0]).all()
    assert capfd.readouterr() == ("", "")  # MuJoCo has nothing to say about Gymnasium's models
    assert list(tmp_path.iterdir()) == []  # nor to write into MUJOCO_LOG.TXT


def test_actions_are_scaled_to_the_bounds():
    env = eaude.make_env("Probe")
    env.reset(seed=0)
    for action in ([-1, -1], [0, 0.5], [1, 1]):
        env.step(np.array(action, np.float32))
    np.testing.assert_allclose(env.unwrapped.actions, [[-2, -2], [1, 2.5], [4, 4]])


# ---- Replay memory ----


def test_the_memory_keeps_the_last_transitions_and_samples_all_of_them():
    memory, rng = eaude.TransitionMemory(10, 2, 1), np.random.default_rng(0)
    for n in range(25):
        memory.add([n, -n], [n / 100], n, [n + 1, -n - 1], n % 3 == 0)
        batch = memory.sample(rng, (2, 200))
        assert set(batch.rewards.ravel()) == set(range(max(0, n - 9), n + 1))
        assert [column.shape for column in batch] == [(2, 200, 2), (2, 200, 1), (2, 200), (2, 200, 2), (2, 200)]
        np.testing.assert_array_equal(batch.observations, batch.rewards[..., None] * [1, -1])
        np.testing.assert_array_equal(batch.next_observations, (batch.rewards[..., None] + 1) * [1, -1])
        np.testing.assert_array_equal(batch.actions[..., 0], batch.rewards / np.float32(100))
        np.testing.assert_array_equal(batch.terminals, batch.rewards % 3 == 0)


# ---- The squashed Gaussian ----


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (0.7, 0.4), (-1.5, 0.8), (0.2, 2.5)])
def test_log_probability_against_numerical_integration(mean, std):
    edges = np.tanh(np.linspace(-9, 9, 200_001))  # of small intervals of actions
    actions = (edges[1:] + edges[:-1]) / 2
    noise = (np.arctanh(actions) - mean) / std
    drawn, log_probs = eaude.squashed_gaussian(np.full((1,), mean), np.full((1,), np.log(std)), noise[:, None])
    np.testing.assert_allclose(drawn[:, 0], actions, atol=1e-5)
    probabilities = np.exp(np.float64(log_probs)) * np.diff(edges)
    for bound in (-0.9, -0.3, 0.2, 0.8, 1.0):
        inside = 0.5 * (1 + math.erf((np.arctanh(min(bound, 1 - 1e-9)) - mean) / std / math.sqrt(2)))
        assert probabilities[actions < bound].sum() == pytest.approx(inside, abs=2e-3)


def test_log_probability_of_several_actions_is_the_sum():
    rng = np.random.default_rng(0)
    mean, log_std, noise = rng.normal(size=(3, 5, 2))
    _, log_probs = eaude.squashed_gaussian(mean, log_std, noise)
    single = [eaude.squashed_gaussian(*(x[:, i : i + 1] for x in (mean, log_std, noise)))[1] for i in range(2)]
    np.testing.assert_allclose(log_probs, single[0] + single[1], rtol=1e-5)


def test_log_probability_is_finite_where_tanh_rounds_to_one():
    actions, log_probs = eaude.squashed_gaussian(np.array([30.0]), np.array([0.0]), np.array([1.0]))
    assert actions[0] == 1
    assert log_probs == pytest.approx(-0.5 - 0.5 * np.log(2 * np.pi) - 2 * (np.log(2) - 31), rel=1e-5)


def test_log_std_is_clipped():
    actor = eaude.Actor((), 1)
    dense = {"kernel": np.ones((1, 1), np.float32), "bias": np.zeros(1, np.float32)}
    params = {"params": {"Dense_0": dense, "Dense_1": dense}}
    assert [float(actor.apply(params, np.array([x]))[1][0]) for x in (-50.0, -3.0, 1.0, 9.0)] == [-20, -3, 1, 2]


# ---- One update ----


@SCRIPTS
def test_the_agent_starts_dense_with_independent_critics_and_their_targets(script):
    args = script.Args()
    actor, critic = script.Actor(args.actor_features, N_ACTIONS), script.Critic(args.critic_features)
    state = jax.device_get(script.init_agent(args, actor, critic, jax.random.key(0), np.zeros(N_OBSERVATIONS)))
    n_critics = 10 if script is eaude else 2
    for layer in state.params["params"].values():
        kernels = layer["kernel"].reshape(n_critics, *layer["kernel"].shape[-2:])
        assert len(np.unique(kernels[:, 0, 0])) == n_critics
        assert np.std(kernels) == pytest.approx(kernels.shape[1] ** -0.5, rel=0.1)  # LeCun's normal distribution
        assert not layer["bias"].any()
    assert_trees_equal(state.target_params, state.params)
    assert state.log_temperature == 0
    assert all(mask.all() for mask in jax.tree.leaves((state.masks, state.actor_masks)))
    assert not any(x.any() for x in jax.tree.leaves((state.opt_state, state.actor_opt_state)))
    if script is eaude:
        assert not any(x.any() for x in (state.cumulated_losses, state.sparsities, state.target_idx))


def reference_update(before, batch, target_idx, critic_noise, args):
    """(params, targets, losses) of all critics, from Alg. 2, l. 6-9, by index of the critic's axes."""
    temperature = np.exp(np.float64(before.log_temperature))
    chosen = [at(before.target_params, idx) for idx in target_idx]
    targets = sac_targets(before.actor_params, chosen, batch, critic_noise, temperature, args.gamma)
    params, target_params, losses = {}, {}, {}
    for idx in np.ndindex(jax.tree.leaves(before.params)[0].shape[: len(target_idx[0])]):
        critic = at(before.params, idx)
        losses[idx], gradients = critic_gradients(critic, batch.observations, batch.actions, targets)
        step = jax.tree.map(lambda g: adam([g], args.learning_rate, args.adam_epsilon), gradients)
        params[idx] = jax.tree.map(lambda x, dx, mask: (x + dx) * mask, critic, step, at(before.masks, idx))
        target = at(before.target_params, idx)
        target_params[idx] = jax.tree.map(lambda x, y: args.tau * x + (1 - args.tau) * y, params[idx], target)
    return params, target_params, losses


def assert_actor_and_temperature(before, after, metrics, critics, observations, noise, args):
    temperature = np.exp(np.float64(before.log_temperature))
    loss, gradients, entropy = actor_gradients(before.actor_params, critics, observations, noise, temperature)
    assert metrics["losses/actor_loss"] == pytest.approx(loss, abs=1e-4)
    assert metrics["losses/entropy"] == pytest.approx(entropy, abs=1e-4)
    assert metrics["losses/alpha"] == pytest.approx(temperature)
    step = jax.tree.map(lambda g: adam([g], args.learning_rate, args.adam_epsilon), gradients)
    expected = jax.tree.map(lambda x, dx, mask: (x + dx) * mask, before.actor_params, step, before.actor_masks)
    assert_close(after.actor_params, expected, 1e-4)
    temperature_step = adam([temperature * (entropy + N_ACTIONS)], args.learning_rate, args.adam_epsilon)
    assert after.log_temperature == pytest.approx(before.log_temperature + temperature_step, abs=1e-5)


@pytest.mark.parametrize("n_networks", [1, 5])
def test_a_whole_update_of_eaudesac_is_that_of_the_paper(n_networks):
    # A large epsilon of Adam, so that a step is nearly in proportion to its gradient.
    flags = dict(n_networks=n_networks, tournament_size=1, learning_rate=0.1, adam_epsilon=0.1)
    args, actor, critic, before = tiny_agent(eaude, **flags)
    batches = random_batches(eaude, np.random.default_rng(0))
    after, metrics = learn(eaude, args, actor, critic, before, batches)

    critic_noise, actor_noise = np.float64(learning_noise(args))
    batch, target_idx = at(batches, 0), [(i, before.target_idx[i]) for i in range(2)]
    params, target_params, losses = reference_update(before, batch, target_idx, critic_noise, args)
    for i, k in np.ndindex(2, n_networks):
        assert_close(at(after.params, (i, k)), params[i, k], 1e-4)
        assert_close(at(after.target_params, (i, k)), target_params[i, k], 1e-5)
        average = 0.9 * before.cumulated_losses[i, k] + 0.1 * losses[i, k]
        assert after.cumulated_losses[i, k] == pytest.approx(average, rel=1e-4)
    assert metrics["losses/qf_loss"] == pytest.approx(np.mean(list(losses.values())), rel=1e-4)
    np.testing.assert_array_equal(after.target_idx, after.cumulated_losses.argmin(axis=1))

    # The actor learns on the critics after their step.
    behaviour_idx = drawn_networks(after.cumulated_losses, CHOICES)
    if n_networks > 1:  # what is chosen and drawn depends on the losses
        even = (CHOICES * n_networks).astype(int)  # if all had the same
        assert not np.any([behaviour_idx == x for x in (after.target_idx, before.target_idx, even)])
        assert (after.target_idx != before.target_idx).all()
    critics = [at(after.params, (i, behaviour_idx[i])) for i in range(2)]
    assert_actor_and_temperature(before, after, metrics, critics, batch.observations, actor_noise, args)
    for field in ("masks", "actor_masks", "sparsities"):
        assert_trees_equal(getattr(after, field), getattr(before, field))


def test_a_whole_update_of_dense_and_pruned_sac_is_that_of_the_paper():
    args, actor, critic, before = tiny_agent(polyprune, learning_rate=0.1, adam_epsilon=0.1)
    batches = random_batches(polyprune, np.random.default_rng(0))
    after, metrics = learn(polyprune, args, actor, critic, before, batches)
    batch, (critic_noise, actor_noise) = at(batches, 0), np.float64(learning_noise(args))
    params, target_params, losses = reference_update(before, batch, [(0,), (1,)], critic_noise, args)
    for i in range(2):
        assert_close(at(after.params, i), params[(i,)], 1e-4)
        assert_close(at(after.target_params, i), target_params[(i,)], 1e-5)
    assert metrics["losses/qf_loss"] == pytest.approx(np.mean(list(losses.values())), rel=1e-4)
    critics = [at(after.params, i) for i in range(2)]
    assert_actor_and_temperature(before, after, metrics, critics, batch.observations, actor_noise, args)


def test_the_reference_gradients_are_those_of_finite_differences():
    """So that a mistake made twice, here and in the scripts, would be seen."""
    _, _, _, state = tiny_agent(polyprune)
    rng, delta = np.random.default_rng(3), 1e-6
    batch, noise = at(random_batches(polyprune, rng), 0), rng.normal(size=(BATCH, N_ACTIONS))
    critics, actor = [at(state.params, i) for i in range(2)], state.actor_params
    targets = rng.normal(size=BATCH)

    def critic_loss(params):
        return np.mean((targets - critic_values(params, batch.observations, batch.actions)) ** 2)

    def actor_loss(params):
        actions, log_probs = policy(params, batch.observations, noise)
        values = np.min([critic_values(critic, batch.observations, actions) for critic in critics], axis=0)
        return np.mean(0.3 * log_probs - values)

    cases = [
        (critic_loss, critics[0], critic_gradients(critics[0], batch.observations, batch.actions, targets)),
        (actor_loss, actor, actor_gradients(actor, critics, batch.observations, noise, 0.3)),
    ]
    for loss, params, (value, gradients, *_) in cases:
        assert value == pytest.approx(loss(params))
        leaves, structure = jax.tree.flatten(jax.tree.map(np.float64, params))
        for leaf, gradient in zip(leaves, jax.tree.leaves(gradients)):
            index = tuple(rng.integers(leaf.shape))
            leaf[index] += delta
            above = loss(jax.tree.unflatten(structure, leaves))
            leaf[index] -= 2 * delta
            slope = (above - loss(jax.tree.unflatten(structure, leaves))) / (2 * delta)
            leaf[index] += delta
            assert gradient[index] == pytest.approx(slope, abs=1e-6)


@SCRIPTS
def test_several_critic_updates_in_a_step_and_one_of_the_actor_from_the_last_batch(script):
    args, actor, critic, start = tiny_agent(script, utd=3)
    batches = random_batches(script, np.random.default_rng(0), utd=3)
    after, _ = learn(script, args, actor, critic, start, batches)
    *critic_noise, actor_noise = learning_noise(args)
    state, learn_critics = start, jax.jit(script.learn_critics, static_argnums=(0, 1, 2))
    for i in range(3):
        state, _ = learn_critics(args, actor, critic, state, at(batches, i), critic_noise[i])
    pair = state.params
    if script is eaude:
        pair = at(state.params, (np.arange(2), drawn_networks(state.cumulated_losses, CHOICES)))
    learn_actor = jax.jit(script.learn_actor, static_argnums=(0, 1, 2))
    state, _ = learn_actor(args, actor, critic, state, pair, batches.observations[-1], actor_noise)
    assert_close(after, jax.device_get(state), 1e-5)
    assert after.opt_state[0].count.ravel()[0] == 3
    assert after.actor_opt_state[0].count == 1


@SCRIPTS
def test_a_step_without_the_actor_leaves_actor_and_temperature(script):
    args, actor, critic, before = tiny_agent(script)
    after, metrics = learn(script, args, actor, critic, before, random_batches(script, np.random.default_rng(0)), False)
    untouched = "actor_params", "log_temperature", "actor_opt_state"
    assert_trees_equal([getattr(after, x) for x in untouched], [getattr(before, x) for x in untouched])
    assert set(metrics) == {"losses/qf_loss", "losses/qf_values"}
    assert (after.params["params"]["Dense_2"]["bias"] != 0).all()


def test_the_actor_learns_on_critics_drawn_in_inverse_proportion_to_their_losses():
    flags = dict(n_networks=3, tournament_size=1, learning_rate=1e-6, tau=1e-6)  # the losses below stay as they are
    args, actor, critic, state = tiny_agent(eaude, **flags)
    losses = np.array([[1, 2, 4], [6, 2, np.inf]], np.float32)
    expected = np.outer(np.array([4, 2, 1]) / 7, np.array([1, 3, 0]) / 4)
    state = state._replace(cumulated_losses=losses)
    batches, counts, n_draws = random_batches(eaude, np.random.default_rng(0)), np.zeros((3, 3)), 400
    noise, rng = learning_noise(args), np.random.default_rng(0)
    actions, log_probs = policy(state.actor_params, batches.observations[0], np.float64(noise[-1]))
    values = [
        [critic_values(at(state.params, (i, k)), batches.observations[0], actions) for k in range(3)] for i in range(2)
    ]
    for _ in range(n_draws):
        draws = eaude.Draws(batches, noise[:-1], noise[-1], rng.random(2, np.float32))
        _, metrics = eaude.learn(args, actor, critic, jax.device_put(state), draws, True)
        gaps = np.zeros((3, 3))
        for j, k in np.ndindex(3, 3):
            loss = np.mean(np.exp(-0.7) * log_probs - np.minimum(values[0][j], values[1][k]))
            gaps[j, k] = abs(loss - metrics["losses/actor_loss"])
        assert gaps.min() < 1e-3
        counts[np.unravel_index(gaps.argmin(), (3, 3))] += 1
    deviation = np.sqrt(expected * (1 - expected) / n_draws)
    assert (np.abs(counts / n_draws - expected) <= 4 * deviation).all()


@pytest.mark.parametrize(
    ("uniform", "losses", "drawn"),
    [
        (0.0, [1, 1, 2], 0),
        (0.39, [1, 1, 2], 0),
        (0.41, [1, 1, 2], 1),
        (0.79, [1, 1, 2], 1),
        (0.81, [1, 1, 2], 2),
        (0.7, [1e-9, 3e-9, np.inf], 0),  # however small they are, as after a reset
        (0.8, [1e-9, 3e-9, np.inf], 1),
    ],
)
def test_a_draw_lies_in_the_stretch_of_one_network(uniform, losses, drawn):
    uniforms, both = np.float32([uniform, 0.5]), np.float32([losses, np.ones(3)])  # each critic has its own
    assert eaude.draw_networks(uniforms, both).tolist() == [drawn, 1]
    assert eaude.draw_networks(uniforms[::-1], both[::-1]).tolist() == [1, drawn]


@SCRIPTS
def test_terminal_states_are_not_bootstrapped(script):
    args, actor, critic, before = tiny_agent(script)
    batches = random_batches(script, np.random.default_rng(0))
    batches = batches._replace(terminals=np.ones_like(batches.terminals))
    other = batches._replace(next_observations=batches.next_observations + 5)
    first, second = (learn(script, args, actor, critic, before, x, False)[1] for x in (batches, other))
    assert first["losses/qf_loss"] == second["losses/qf_loss"]
    batches, other = (x._replace(terminals=np.zeros_like(x.terminals)) for x in (batches, other))
    first, second = (learn(script, args, actor, critic, before, x, False)[1] for x in (batches, other))
    assert first["losses/qf_loss"] != second["losses/qf_loss"]


@SCRIPTS
def test_pruned_weights_stay_exactly_zero_and_the_others_learn(script):
    args, actor, critic, state = tiny_agent(script)
    start, rng = state, np.random.default_rng(0)
    for _ in range(100):
        state, _ = learn(script, args, actor, critic, state, random_batches(script, rng))
    for params, masks in ((state.params, start.masks), (state.actor_params, start.actor_masks)):
        assert not any(x[~mask].any() for x, mask in zip(jax.tree.leaves(params), jax.tree.leaves(masks)))
    changed = np.concatenate([(x != y).ravel() for x, y in zip(*map(jax.tree.leaves, (state.params, start.params)))])
    kept = np.concatenate([mask.ravel() for mask in jax.tree.leaves(start.masks)])
    assert changed[kept].mean() > 0.8


# ---- The populations ----


def test_targets_follow_the_lowest_losses_of_each_critic():
    args, actor, critic, state = tiny_agent(eaude, tau=1e-4)
    losses = np.array([[5, 1, 5, 5, 5], [5, 5, 5, 0.5, np.inf]], np.float32)
    state = state._replace(cumulated_losses=losses)
    state, _ = learn(eaude, args, actor, critic, state, random_batches(eaude, np.random.default_rng(0)))
    assert state.target_idx.tolist() == [1, 3]
    assert state.cumulated_losses[1, 4] == np.inf


def test_after_a_reset_the_first_losses_decide():
    args, actor, critic, state = tiny_agent(eaude)
    state = state._replace(cumulated_losses=np.zeros((2, 5), np.float32), target_idx=np.array([4, 4]))
    batches = random_batches(eaude, np.random.default_rng(0))
    noise = np.float64(learning_noise(args))
    _, _, losses = reference_update(state, at(batches, 0), [(0, 4), (1, 4)], noise[0], args)
    state, _ = learn(eaude, args, actor, critic, state, batches)
    for i, k in np.ndindex(2, 5):
        assert state.cumulated_losses[i, k] == pytest.approx(0.1 * losses[i, k], rel=1e-4)
    assert state.target_idx.tolist() == [min(range(5), key=lambda k, i=i: losses[i, k]) for i in range(2)]


@pytest.mark.parametrize("field", ["params", "opt_state"])  # with the latter weights follow on a finite loss
def test_a_network_with_a_loss_or_a_weight_that_is_not_finite_is_not_chosen(field):
    args, actor, critic, state = tiny_agent(eaude)
    state = state._replace(**{field: jax.tree.map(np.array, getattr(state, field))})
    params = state.params if field == "params" else state.opt_state[0].mu
    best = state.cumulated_losses[0].argmin()
    params["params"]["Dense_2"]["bias"][0, best] = np.nan
    after, _ = learn(eaude, args, actor, critic, state, random_batches(eaude, np.random.default_rng(0)))
    assert np.isinf(after.cumulated_losses[0, best])
    assert np.isfinite(after.cumulated_losses).sum() == 9
    assert after.target_idx[0] != best
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(after.actor_params))


def test_the_actor_never_learns_from_a_diverged_critic():
    losses = np.random.default_rng(0).random((20_000, 5), np.float32)
    losses[:, [0, 4]] = np.inf
    for uniform in (0.0, 0.5, 1 - 2**-24):  # 24 bits: the largest that a generator draws
        drawn = eaude.draw_networks(np.full(len(losses), uniform, np.float32), losses)
        assert set(np.unique(drawn)) <= {1, 2, 3}


@pytest.mark.parametrize("tau", [0.1, 1.0])
def test_a_network_that_has_diverged_once_stays_out_until_the_next_tournament(tau):
    args, actor, critic, state = tiny_agent(eaude, tau=tau)
    losses, best = state.cumulated_losses.copy(), state.cumulated_losses[1].argmin()
    losses[1, best] = np.inf
    after, _ = learn(
        eaude,
        args,
        actor,
        critic,
        state._replace(cumulated_losses=losses),
        random_batches(eaude, np.random.default_rng(0)),
    )
    assert after.cumulated_losses[1, best] == np.inf
    assert after.target_idx[1] != best


@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])
def test_copies_are_pruned_with_new_optimizers_and_all_else_is_untouched(distribution):
    flags = dict(total_timesteps=10_000, max_speed=0.9, sparsity_distribution=distribution)
    args, actor, critic, before = tiny_agent(eaude, **flags)
    for _ in range(3):
        before, _ = learn(eaude, args, actor, critic, before, random_batches(eaude, np.random.default_rng(0)))
    parents = np.array([[1, 1, 2, 3, 1], [0, 1, 2, 3, 3]])  # three copies: two of network 1, one of network 3
    after = eaude.prune_critic_copies(args, np.random.default_rng(5), jax.device_put(before), parents, 4_000)
    after = jax.device_get(after)

    population = "params", "target_params", "opt_state", "masks", "sparsities"
    rng = np.random.default_rng(5)
    for (i, k), parent in np.ndenumerate(parents):
        if parent == k:
            for field in population:
                assert_trees_equal(at(getattr(after, field), (i, k)), at(getattr(before, field), (i, k)))
            assert after.opt_state[0].count[i, k] == 3
            continue
        sparsity = float(before.sparsities[i, parent])
        sparsity = eaude.next_sparsity(sparsity, rng.uniform(0, 3), 4_000, 5_000, 10_000, 0.9)
        assert after.sparsities[i, k] == pytest.approx(sparsity)
        parent_params, masks = at(before.params, (i, parent)), at(after.masks, (i, k))
        assert_trees_equal(masks, eaude.magnitude_masks(parent_params, sparsity, distribution))
        assert_trees_equal(at(after.params, (i, k)), jax.tree.map(np.multiply, parent_params, masks))
        assert_trees_equal(at(after.target_params, (i, k)), at(before.target_params, (i, parent)))
        assert_trees_equal(at(after.opt_state, (i, k)), eaude.make_optimizer(args).init(parent_params))
    rest = [field for field in before._fields if field not in population]
    assert_trees_equal([getattr(after, field) for field in rest], [getattr(before, field) for field in rest])


def test_the_target_of_a_copy_follows_its_mask_softly():
    args, actor, critic, before = tiny_agent(eaude, max_speed=0.9, total_timesteps=10_000)
    parents = np.array([[1, 1, 2, 3, 4], [0, 1, 2, 3, 4]])
    state = jax.device_get(
        eaude.prune_critic_copies(args, np.random.default_rng(0), jax.device_put(before), parents, 0)
    )
    pruned = ~state.masks["params"]["Dense_1"]["kernel"][0, 0]
    target = state.target_params["params"]["Dense_1"]["kernel"][0, 0][pruned]
    assert target.any()
    after, _ = learn(eaude, args, actor, critic, state, random_batches(eaude, np.random.default_rng(0)))
    np.testing.assert_allclose(
        after.target_params["params"]["Dense_1"]["kernel"][0, 0][pruned], 0.9 * target, rtol=1e-5
    )


def test_polyprune_masks_each_critic_by_its_own_weights():
    args, _, _, before = tiny_agent(polyprune, total_timesteps=10_000, sparsity_distribution="uniform")
    after = jax.device_get(polyprune.prune_critics(args, before, 5_000))
    assert after.sparsity == pytest.approx(0.95 * 0.875)
    for i in range(2):
        masks = polyprune.magnitude_masks(at(before.params, i), 0.95 * 0.875, "uniform")
        assert_trees_equal(at(after.masks, i), masks)
        assert_trees_equal(at(after.params, i), jax.tree.map(np.multiply, at(before.params, i), masks))
    untouched = [field for field in before._fields if field not in ("params", "masks", "sparsity")]
    assert_trees_equal([getattr(after, x) for x in untouched], [getattr(before, x) for x in untouched])


# ---- Whole runs ----

SHORT = dict(env_id="Probe", critic_features=(4, 4), actor_features=(4, 4), batch_size=8, eval_episodes=2)


@pytest.fixture
def short(tmp_path):
    """Flags of a short run of the probe task."""
    return SHORT | dict(runs_dir=tmp_path, learning_starts=40, total_timesteps=100, pruning_period=20, eval_period=50)


def record_transitions(script, monkeypatch):
    rows, add = [], script.TransitionMemory.add
    monkeypatch.setattr(script.TransitionMemory, "add", lambda self, *row: rows.append(row) or add(self, *row))
    return rows


@SCRIPTS
def test_terminations_are_stored_and_time_limits_are_not(script, short, monkeypatch):
    rows = record_transitions(script, monkeypatch)
    script.train(script.Args(**short))
    for n, (observation, _, reward, next_observation, terminal) in enumerate(rows):
        episode, step = divmod(n, 5)
        assert observation.tolist() == [episode, step]
        assert next_observation.tolist() == [episode, step + 1]  # also at an episode's end: not the next one's start
        assert terminal == (step == 4 and episode % 2 == 0)
        assert reward == 1
    assert len(rows) == 100


@SCRIPTS
def test_steps_of_learning_pruning_and_evaluation_come_in_their_periods(script, short, monkeypatch):
    prune = "prune_critic_copies" if script is eaude else "prune_critics"
    draws, real_learn = [], script.learn
    monkeypatch.setattr(script, "learn", lambda *inputs: draws.append(inputs[4]) or real_learn(*inputs))
    calls = record_calls(script, monkeypatch, ["learn", prune])
    monkeypatch.setattr(script, "LOG_PERIOD", 20)
    curves = scalars(script.train(script.Args(**short, policy_delay=3)))
    _, critic_noise, actor_noise, *choices = zip(*draws)
    noise, choices = (
        np.concatenate([critic_noise, np.array(actor_noise)[:, None]], axis=1),
        [np.array(x) for x in choices],
    )
    assert noise.shape == (60, 2, 8, 2)  # updates, utd + 1, batch, actions
    assert len(np.unique(noise)) > 0.99 * noise.size  # each number is drawn on its own, also that of another action
    assert noise.mean() == pytest.approx(0, abs=0.1)
    assert noise.std() == pytest.approx(1, abs=0.1)
    for x in choices:
        assert len(np.unique(x)) == np.size(x) == 120
        np.testing.assert_allclose(np.sort(x, axis=None), np.linspace(0, 1, 120), atol=0.15)  # uniform
    assert [step for step, _ in curves["losses/actor_loss"]] == [60, 80, 100]  # those of the last actor step
    expected = []
    for step in range(1, 101):
        expected += [("learn", step - 1)] if step > 40 else []  # the transition in flight is not yet in the memory
        expected += [(prune, step)] if step % 20 == 0 and (step > 40 or script is polyprune) else []
    assert [(name, step) for name, step, *_ in calls] == expected
    for name, n_added, before, after in calls:
        if name == "learn":
            actor_moved = after.actor_opt_state[0].count - before.actor_opt_state[0].count
            assert actor_moved == ((n_added + 1) % 3 == 0)
    assert [step for step, _ in curves["eval/episodic_return"]] == [50, 100]
    assert [value for _, value in curves["eval/episodic_return"]] == [5, 5]


def test_tournaments_are_held_for_each_critic_by_its_own_losses(short, monkeypatch):
    drawn, select = [], eaude.select_population

    def select_population(rng, losses, size):
        assert size == 3
        drawn.append((np.array(losses), select(rng, losses, size)))
        return drawn[-1][1]

    monkeypatch.setattr(eaude, "select_population", select_population)
    calls = record_calls(eaude, monkeypatch, ["learn", "prune_critic_copies"])
    curves = scalars(eaude.train(eaude.Args(**short, max_speed=0.5)))
    prunings = [(step, before, after) for name, step, before, after in calls if name == "prune_critic_copies"]
    assert len(drawn) == 2 * len(prunings) == 6
    differing = []
    for (step, before, after), tournaments in zip(prunings, zip(drawn[::2], drawn[1::2])):
        for i, (losses, parents) in enumerate(tournaments):
            np.testing.assert_array_equal(losses, before.cumulated_losses[i])
            best = losses.argmin()
            assert before.target_idx[i] == after.target_idx[i] == best  # the target's network survives
            for field in ("params", "target_params", "opt_state"):
                assert_trees_equal(at(getattr(after, field), (i, best)), at(getattr(before, field), (i, best)))
            copies = parents != np.arange(5)
            assert (after.sparsities[i][copies] > before.sparsities[i][parents][copies]).all()
            for k in range(5):
                assert dict(curves[f"losses/critic_{i}/cumulated_{k}"])[step] == pytest.approx(losses[k])
                assert dict(curves[f"sparsity/critic_{i}/network_{k}"])[step] == before.sparsities[i, k]
        differing.append((tournaments[0][1] != tournaments[1][1]).any())
        target = np.mean([before.sparsities[i, before.target_idx[i]] for i in range(2)])
        assert dict(curves["sparsity/target"])[step] == pytest.approx(target)
    assert any(differing)
    for name, n_added, before, _ in calls:
        if name == "learn" and n_added % 20 == 0:
            assert not before.cumulated_losses.any()  # L was reset


@SCRIPTS
def test_without_pruning_all_critics_stay_dense(script, short, monkeypatch):
    prune = "prune_critic_copies" if script is eaude else "prune_critics"
    calls = record_calls(script, monkeypatch, [prune])
    script.train(script.Args(**short, **(dict(max_noise=0.0) if script is eaude else dict(final_sparsity=0.0))))
    assert len(calls) == (3 if script is eaude else 5)
    assert all(mask.all() for *_, after in calls for mask in jax.tree.leaves((after.masks, after.actor_masks)))


@SCRIPTS
def test_the_actor_is_pruned_on_the_schedule(script, short, monkeypatch):
    calls = record_calls(script, monkeypatch, ["learn", "prune_actor"])
    schedule = dict(actor_final_sparsity=0.8, pruning_start=0.1, pruning_end=0.6, pruning_power=2)
    schedule |= {} if script is eaude else dict(final_sparsity=0.0)  # also beside dense critics
    flags = short | dict(actor_features=(30, 30), sparsity_distribution="erk")
    curves = scalars(script.train(script.Args(**flags, **schedule)))
    prunings = [(step, after) for name, step, _, after in calls if name == "prune_actor"]
    assert [step for step, _ in prunings] == [20, 40, 60, 80, 100]
    for step, after in prunings:
        expected = script.polynomial_sparsity(step, 100, 0.8, 0.1, 0.6, 2)
        assert_trees_equal(after.actor_masks, script.magnitude_masks(after.actor_params, expected, "erk"))
        assert script.sparsity_of(after.actor_masks) == pytest.approx(expected, abs=0.01)
        assert dict(curves["sparsity/actor"])[step] == pytest.approx(script.sparsity_of(after.actor_masks))
    last = next(after for name, _, _, after in reversed(calls) if name == "learn")
    kept = [x[~m] for x, m in zip(jax.tree.leaves(last.actor_params), jax.tree.leaves(last.actor_masks))]
    assert sum(x.size for x in kept) > 500
    assert not np.concatenate(kept).any()


def test_critics_of_polyprune_follow_the_schedule(short, monkeypatch):
    calls = record_calls(polyprune, monkeypatch, ["prune_critics"])
    schedule = dict(final_sparsity=0.7, pruning_start=0.1, pruning_end=0.6, pruning_power=2)
    flags = short | dict(critic_features=(30, 30), sparsity_distribution="erk")
    curves = scalars(polyprune.train(polyprune.Args(**flags, **schedule)))
    for _, step, _, after in calls:
        expected = polyprune.polynomial_sparsity(step, 100, 0.7, 0.1, 0.6, 2)
        for i in range(2):
            masks = polyprune.magnitude_masks(at(after.params, i), expected, "erk")
            assert_trees_equal(at(after.masks, i), masks)
        assert after.sparsity == np.float32(expected)
        assert polyprune.sparsity_of(at(after.masks, 0)) == pytest.approx(expected, abs=0.01)
        assert dict(curves["sparsity/target"])[step] == pytest.approx(expected)


@SCRIPTS
def test_the_first_actions_are_uniform_and_the_others_of_the_policy(script, short, monkeypatch):
    rows, drawn, act, envs = record_transitions(script, monkeypatch), [], script.policy_actions, []

    def policy_actions(actor, params, observation, noise):
        drawn.append((observation, noise, np.asarray(act(actor, params, observation, noise))))
        return drawn[-1][2]

    make = script.make_env
    monkeypatch.setattr(script, "make_env", lambda env_id: envs.append(make(env_id)) or envs[-1])
    monkeypatch.setattr(script, "policy_actions", policy_actions)
    script.train(script.Args(**short | dict(learning_starts=2_000, total_timesteps=2_100, eval_period=10_000)))
    actions = np.array([row[1] for row in rows[:2_000]])
    assert np.abs(np.sort(actions.ravel()) - np.linspace(-1, 1, actions.size)).max() < 0.05
    assert len(np.unique(actions)) > 0.99 * actions.size  # also in another dimension
    assert len(drawn) == 100
    assert len(np.unique([noise for _, noise, _ in drawn])) == 200
    assert np.std([noise for _, noise, _ in drawn]) == pytest.approx(1, abs=0.2)
    for (observation, _, action), row in zip(drawn, rows[2_000:]):
        np.testing.assert_array_equal(observation, row[0])
        np.testing.assert_array_equal(action, row[1])
    np.testing.assert_allclose(envs[0].unwrapped.actions, 1 + 3 * np.array([row[1] for row in rows]), atol=1e-5)
    assert all(row[1].dtype == np.float32 for row in rows)  # what is played is what the memory stores


def test_evaluation_is_deterministic_and_starts_the_same_each_time():
    envs = [eaude.make_env("Hopper") for _ in range(3)]
    actor = eaude.Actor((8,), 3)
    params = actor.init(jax.random.key(0), np.zeros(11))
    first, again = (eaude.evaluate_actor(envs, actor, params) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert len(set(first)) == 3  # three different episodes
    for i, env in enumerate(envs):  # each is the return of one whole episode of the policy's mean
        observation, total, done = env.reset(seed=eaude.EVAL_SEED + i)[0], 0.0, False
        while not done:
            action = np.tanh(actor.apply(params, observation)[0])
            observation, reward, terminal, truncation, _ = env.step(np.asarray(action))
            total, done = total + reward, terminal or truncation
        assert first[i] == pytest.approx(total)


@SCRIPTS
def test_seeds_decide_everything(script, short, monkeypatch):
    resets, reset = [], Probe.reset
    monkeypatch.setattr(Probe, "reset", lambda self, seed, options: resets.append(seed) or reset(self, seed))
    folders = [script.train(script.Args(**short, seed=seed)) for seed in (3, 3, 4)]
    weights, curves = [final_weights(folder) for folder in folders], [scalars(folder) for folder in folders]
    assert_trees_equal(weights[0], weights[1])
    assert all((x != weights[2][name]).any() for name, x in weights[0].items() if name.startswith("actor"))
    for tag in curves[0].keys() - {"charts/SPS"}:
        assert curves[0][tag] == curves[1][tag]
    runs = np.array(resets).reshape(3, -1)
    assert (runs[0] == runs[1]).all()
    training = [[seed for seed in run if not 0 <= seed - script.EVAL_SEED < 2] for run in runs]
    assert len(set(training[0])) == len(training[0]) == 21  # a seed for each episode
    assert not set(training[0]) & set(training[2])


@SCRIPTS
def test_speed_is_that_of_updates(script, short, monkeypatch):
    """Not of the steps before the first update, which are fast, nor of the first updates, of which one compiles."""
    real_learn, seconds = script.learn, [0.0]
    monkeypatch.setattr(script.time, "perf_counter", lambda: sum(seconds))

    def learn(*inputs):
        seconds.append(0.5 if len(seconds) > 1 else 1_000.0)
        return real_learn(*inputs)

    monkeypatch.setattr(script, "learn", learn)
    monkeypatch.setattr(script, "LOG_PERIOD", 10)
    speeds = scalars(script.train(script.Args(**short | dict(total_timesteps=200))))["charts/SPS"]
    assert speeds == [(step, 2.0) for step in range(150, 201, 10)]  # learning starts at 41


@SCRIPTS
def test_run_stops_with_a_message_when_critics_diverge(script, short, monkeypatch, capsys):
    monkeypatch.setattr(Probe, "__init__", lambda self, init=Probe.__init__: init(self, reward=np.nan))
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(**short))
    assert exit_info.value.code == 2
    assert "error: the actor has diverged at step 41; try a lower --learning-rate" in capsys.readouterr().err


@SCRIPTS
def test_a_run_that_diverges_in_its_last_step_leaves_no_policy(script, short, monkeypatch, capsys):
    monkeypatch.setattr(Probe, "__init__", lambda self, init=Probe.__init__: init(self, reward=np.nan))
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(**short | dict(total_timesteps=41)))
    assert exit_info.value.code == 2
    assert "the networks have diverged by step 41" in capsys.readouterr().err
    assert not list(short["runs_dir"].glob("*/policy.npz*"))


@pytest.mark.slow
@SCRIPTS
def test_the_pendulum_is_balanced_by_pruned_and_by_dense_critics(script, tmp_path):
    features = dict(critic_features=(128, 128), actor_features=(128, 128))
    flags = dict(env_id="InvertedPendulum", runs_dir=tmp_path, total_timesteps=4_000, learning_starts=300)
    flags |= dict(utd=4, batch_size=128, learning_rate=3e-3, eval_period=500, **features)
    flags |= dict(n_networks=3, tournament_size=2, pruning_period=200) if script is eaude else dict(final_sparsity=0.0)
    curves = scalars(script.train(script.Args(**flags)))
    returns = [value for _, value in curves["eval/episodic_return"]]
    assert returns[0] < 200
    assert max(returns) > 900
    assert (curves["sparsity/target"][-1][1] > 0.03) == (script is eaude)


@pytest.mark.parametrize(("lost", "stops"), [((1, 2), False), ((1, slice(None)), True)])
def test_only_the_loss_of_a_whole_population_stops_the_run(lost, stops, short, monkeypatch, capsys):
    real_learn, sparsities = eaude.learn, []

    def learn(*inputs):
        state, metrics = real_learn(*inputs)
        sparsities.append(np.array(state.sparsities))
        losses, step = state.cumulated_losses, 40 + len(sparsities)
        return state._replace(cumulated_losses=losses.at[lost].set(np.inf) if step == 45 else losses), metrics

    monkeypatch.setattr(eaude, "learn", learn)
    if not stops:
        eaude.train(eaude.Args(**short))
        assert sparsities[19][1, 2] == 0  # step 60
        assert sparsities[20][1, 2] > 0  # a copy has taken its place
        return
    with pytest.raises(SystemExit):
        eaude.train(eaude.Args(**short))
    # seen at the next tournament
    assert "all networks of a critic have diverged by step 60" in capsys.readouterr().err


PENDULUM = "--env-id InvertedPendulum --total-timesteps 1500 --learning-starts 500 --pruning-period 100 --batch-size 32"
PENDULUM += " --critic-features 16 16 --actor-features 16 16 --eval-period 500 --eval-episodes 3"


@SCRIPTS
def test_a_short_run_logs_everything(script, tmp_path):
    result = run_script(script, PENDULUM, tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    (folder,) = tmp_path.iterdir()
    assert folder.name.startswith(f"InvertedPendulum-v5__{script.__name__}__1__")
    assert json.loads((folder / "args.json").read_text())["critic_features"] == [16, 16]
    curves = scalars(folder)
    expected = {f"charts/{name}" for name in ("episodic_return", "episodic_length", "SPS")}
    expected |= {f"losses/{name}" for name in ("qf_loss", "qf_values", "actor_loss", "entropy", "alpha")}
    expected |= {"sparsity/target", "eval/episodic_return"}
    if script is eaude:
        tags = [f"sparsity/critic_{i}/network" for i in range(2)] + [f"losses/critic_{i}/cumulated" for i in range(2)]
        expected |= {f"{tag}_{k}" for tag in tags for k in range(5)}
        expected |= {f"population/distinct_{i}" for i in range(2)}
        assert [step for step, _ in curves["sparsity/critic_1/network_4"]] == list(range(600, 1_501, 100))
        assert max(curves[f"sparsity/critic_0/network_{k}"][-1][1] for k in range(5)) > 0
    else:
        assert curves["sparsity/target"][-1] == (1_500, pytest.approx(0.95))
    assert set(curves) == expected
    assert [step for step, _ in curves["eval/episodic_return"]] == [500, 1_000, 1_500]
    assert all(value == int(value) for _, value in curves["charts/episodic_return"])  # a point for each step
    for text in (str(folder), "1,500/1,500 steps", "Finished after 1,500"):
        assert text in result.stdout
    assert re.search(r"1,500/1,500 steps.*, evaluation=\d", result.stdout)


def test_ctrl_c_ends_the_run_cleanly(tmp_path):
    code, output, errors = stop_script(eaude, PENDULUM.replace("1500", "100_000"), tmp_path, signal.SIGINT)
    assert (code, errors) == (130, "")
    assert "Interrupted after" in output


@SCRIPTS
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (dict(env_id="HalfCheeta"), "unknown MuJoCo task 'HalfCheeta'; the closest names are HalfCheetah, "),
        (dict(env_id="ALE/Pong-v5"), "unknown MuJoCo task 'ALE/Pong-v5'; the closest names are "),
        (dict(env_id="Ant-v9"), "unknown MuJoCo task 'Ant-v9'; the closest names are Ant, "),
        (dict(env_id="Ant-v4"), "unknown MuJoCo task 'Ant-v4'; the closest names are Ant, "),  # needs older packages
        (dict(env_id="CartPole"), "unknown MuJoCo task 'CartPole'; the closest names are "),
        (dict(critic_features=(256, 0)), "--critic-features must be from 1 to inf, not (256, 0)"),
        (dict(actor_features=(0,)), "--actor-features must be from 1 to inf, not (0,)"),
        (dict(tau=1.5), "--tau must be from 0 to 1, not 1.5"),
        (dict(utd=0), "--utd must be from 1 to inf, not 0"),
        (dict(policy_delay=0), "--policy-delay must be from 1 to inf, not 0"),
        (dict(eval_period=0), "--eval-period must be from 1 to inf, not 0"),
        (dict(pruning_period=0), "--pruning-period must be from 1 to inf, not 0"),
        (dict(actor_final_sparsity=1.2), "--actor-final-sparsity must be from 0 to 0.999, not 1.2"),
        (dict(pruning_start=0.5, pruning_end=0.4), "--pruning-end must be from 0.5 to 1"),
        (
            dict(total_timesteps=500),
            "--learning-starts must be from 1 to 500, the value of --total-timesteps",
        ),
    ],
)
def test_wrong_input_gets_one_message_and_leaves_nothing(script, flags, message, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit_info:
        script.train(script.Args(**flags))
    assert exit_info.value.code == 2
    output = capsys.readouterr()
    assert output.err.startswith(f"error: {message}")
    assert output.err.count("\n") == 1
    assert output.out == ""
    assert list(tmp_path.iterdir()) == []
