"""The two scripts of MinAtar: games, replay memory and `train`. What has the same bytes as on Atari is tested there."""

import collections
import itertools

import flax.linen as nn
import jax
import minatar
import numpy as np
import pytest
from common import assert_trees_equal, final_weights, scalars
from test_resume import assert_same_results, checkpoint, start, stop_after

import eaudedqn_atari
import eaudedqn_minatar
import polyprune_dqn_minatar
from eaudedqn_minatar import GridMemory, MinAtarEnv, QNetwork, canonical_name

SCRIPTS = pytest.mark.parametrize("script", [eaudedqn_minatar, polyprune_dqn_minatar], ids=["eaudedqn", "polyprune"])
TITLES = {"asterix": "Asterix", "breakout": "Breakout", "freeway": "Freeway", "seaquest": "Seaquest"}
TITLES["space_invaders"] = "SpaceInvaders"  # by the package's names
EVERY_GAME = pytest.mark.parametrize("name", TITLES)


# ---- The games -------------------------------------------------------------------------------------------------------
def play_package(name, seed, actions):
    """What the package itself answers: the first state, then (state, reward, terminal) of each action until the end."""
    game = minatar.Environment(name)
    game.seed(seed)
    game.reset()
    yield game.state(), 0, False
    for action in actions:
        reward, terminal = game.act(game.minimal_action_set()[action])
        yield game.state(), reward, terminal
        if terminal:
            return


def play_env(env, seed, actions):
    yield env.reset(seed=seed)[0], 0, False
    for action in actions:
        observation, reward, terminal, _, _ = env.step(action)
        yield observation, reward, terminal
        if terminal:
            return


def assert_same_episodes(found, expected):
    for left, right in itertools.zip_longest(found, expected):
        np.testing.assert_array_equal(left[0], right[0])
        assert left[1:] == right[1:]


@EVERY_GAME
def test_a_game_is_the_packages(name):
    """Every episode on one environment, that of the package on a new one: rewards, ends and states, sticky actions."""
    env, rng, n_rewards, n_ends = MinAtarEnv(TITLES[name], 27_000), np.random.default_rng(0), 0, 0
    for seed in range(12):
        actions = rng.integers(len(env.action_set), size=3_000)
        actions[rng.random(3_000) < seed % 2 / 2] = 1  # else nobody crosses the road
        expected = list(play_package(name, seed, actions))
        assert_same_episodes(play_env(env, seed, actions), expected)
        n_rewards += sum(reward for _, reward, _ in expected)
        n_ends += expected[-1][2]
    assert n_rewards > 0
    assert n_ends == 12
    observation, info = env.reset(seed=0)
    assert (observation.dtype, observation.shape, info) == (np.uint8, tuple(env.game.state_shape()), {})
    assert set(np.unique(observation)) == {0, 1}
    assert getattr(env.game.env, "ramping", True)  # two games have no difficulty that grows


@EVERY_GAME
def test_the_first_action_does_not_stick_to_the_episode_before(name):
    """In one episode of ten it is the last one that sticks, and the package leaves that of the episode before."""
    env, n_stuck = MinAtarEnv(TITLES[name], 27_000), 0
    last = len(env.action_set) - 1
    for seed in range(60):
        for _ in play_env(env, 1_000, [last] * 3):  # leaves the last action behind
            pass
        assert env.game.last_action == env.action_set[last]
        assert_same_episodes(play_env(env, seed, [last] * 3), play_package(name, seed, [last] * 3))
        env.reset(seed=seed)
        env.step(last)
        n_stuck += env.game.last_action == 0
    assert 1 <= n_stuck <= 15


def test_a_tenth_of_the_actions_stick():
    env, done = MinAtarEnv("Freeway", 27_000), []
    env.reset(seed=0)
    act = env.game.env.act
    env.game.env.act = lambda action: done.append(action) or act(action)
    n_stuck = 0
    for step in range(8_000):
        if step % 2_000 == 0:
            env.reset(seed=step)
        action = next(i for i, x in enumerate(env.action_set) if x != env.game.last_action)
        previous = env.game.last_action
        env.step(action)
        assert done[-1] in (previous, env.action_set[action])
        n_stuck += done[-1] == previous
    assert len(done) == 8_000
    assert 0.09 < n_stuck / 8_000 < 0.11  # three standard deviations


@EVERY_GAME
def test_the_smallest_action_set(name):
    names = {"asterix": "nlurd", "breakout": "nlr", "freeway": "nud", "seaquest": "nlurdf", "space_invaders": "nlrf"}
    env = MinAtarEnv(TITLES[name], 27_000)
    assert "".join("nlurdf"[action] for action in env.action_set) == names[name]


def test_the_horizon_cuts_an_episode_that_has_not_ended():
    env = MinAtarEnv("Freeway", 5)
    for seed in range(2):  # counted from the start of each episode
        env.reset(seed=seed)
        env.step(1)
        env.reset(seed=seed)
        ends = [env.step(1)[2:4] for _ in range(5)]
        assert ends == [(False, False)] * 4 + [(False, True)]
    length = len(list(play_package("breakout", 0, [0] * 100))) - 1
    env = MinAtarEnv("Breakout", length)
    env.reset(seed=0)
    assert [env.step(0)[2:4] for _ in range(length)][-1] == (True, False)  # an end is an end


@pytest.mark.parametrize(("words", "name"), TITLES.items())
def test_games_go_by_the_names_people_write(words, name):
    for env_id in (name, name.lower(), words, f"MinAtar/{name}-v1", f"minatar/{words}", f"{name}-v1"):
        assert canonical_name(env_id) == name


@SCRIPTS
@pytest.mark.parametrize("env_id", ["Pong", "Breakou", "ALE/Breakout-v5", "MinAtar/", ""])
def test_a_wrong_name_lists_all_games(script, env_id, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.Args(env_id=env_id, runs_dir=tmp_path))
    assert exit_info.value.code == 2
    games = "Asterix, Breakout, Freeway, Seaquest, SpaceInvaders"
    assert capsys.readouterr() == ("", f"error: unknown MinAtar game {env_id!r}; there are {games}\n")
    assert list(tmp_path.iterdir()) == []


# ---- Replay memory ---------------------------------------------------------------------------------------------------
SHAPE = (10, 10, 1)


def grid(number):
    """An observation that says which one it is."""
    return np.resize(np.array([number // 200, number % 200], np.uint8), SHAPE)


def number_of(observation):
    return int(observation.flat[0]) * 200 + int(observation.flat[1])


def transitions(n_steps, seed):
    """Random episodes of 1 to 9 steps, one in three cut by the horizon. The action is the number of the step."""
    rng, numbers = np.random.default_rng(seed), itertools.count()
    observation, steps_left = grid(next(numbers)), rng.integers(1, 10)
    for action in range(n_steps):
        steps_left -= 1
        truncation = steps_left == 0 and bool(rng.random() < 1 / 3)
        terminal = steps_left == 0 and not truncation
        next_observation = grid(next(numbers))
        if steps_left == 0:
            next_observation, steps_left = grid(next(numbers)), rng.integers(2, 10)  # the first of the next episode
        yield observation, action, float(rng.integers(-3, 4)), terminal, truncation, next_observation
        observation = next_observation


@pytest.mark.parametrize("size", [2, 3, 7, 50])
def test_samples_are_exactly_the_last_transitions(size):
    memory, kept, rng, n_checks = GridMemory(size, SHAPE), collections.deque(maxlen=size), np.random.default_rng(0), 0
    for transition in transitions(150, seed=size):
        memory.add(*transition)
        kept.append(transition)
        valid = {x[1]: x for x in kept if not x[4]}
        if not valid:
            continue
        batch = memory.sample(rng, 20 * size)
        assert len(batch.actions) == 20 * size
        assert set(batch.actions) == set(valid)  # from the oldest to the newest, and none that was cut
        for observation, action, reward, next_observation, terminal in zip(*batch):
            expected = valid[action]
            assert number_of(observation) == number_of(expected[0])
            assert reward == np.clip(expected[2], -1, 1)
            assert terminal == expected[3]
            assert terminal or number_of(next_observation) == number_of(expected[5])
        n_checks += 1
    assert n_checks > 100


@pytest.mark.parametrize("n_before", [1, 5, 6, 7, 33])
def test_a_memory_goes_on_from_what_it_saved(n_before):
    memory, steps = GridMemory(6, SHAPE), list(transitions(60, seed=1))
    for transition in steps[:n_before]:
        memory.add(*transition)
    saved = {name: np.copy(x) for name, x in memory.saved().items()}
    assert len(saved["rows"]) == min(n_before + 1, 7)  # a checkpoint has no rows that were never filled
    again = GridMemory(6, SHAPE)
    again.load(**saved)
    for transition in [None, *steps[n_before:]]:
        for current in (memory, again):
            if transition:
                current.add(*transition)
        samples = [current.sample(np.random.default_rng(0), 50) for current in (memory, again)]
        assert_trees_equal(*samples)


def test_observations_are_stored_once():
    row = 10 * 10 * 10 + 4 + 4 + 1 + 1  # the most channels; action, reward, two ends
    assert GridMemory(1_000, (10, 10, 10)).rows.nbytes == 1_001 * row


# ---- Network ---------------------------------------------------------------------------------------------------------
def layers_that_run(network, observations):
    """By the modules themselves, in the order in which they are called."""
    found = {}

    def note(call, inputs, options, context):
        module = context.module
        if isinstance(module, nn.Conv):
            (stride,) = set(np.ravel(module.strides or 1).tolist())
            found[module.name] = {"kind": "convolution", "stride": stride, "padding": module.padding}
            assert (module.input_dilation, module.kernel_dilation, module.feature_group_count) == (1, 1, 1)
        elif isinstance(module, nn.Dense):
            found[module.name] = {"kind": "dense"}
        return call(*inputs, **options)

    with nn.intercept_methods(note):
        params = network.init(jax.random.key(0), observations)
    return found, params


@pytest.mark.parametrize(
    ("network", "shape"),
    [(QNetwork((2, 3), 4), (10, 10, 5)), (eaudedqn_atari.QNetwork((2, 3, 3, 4), 4), (4, 84, 84))],
    ids=["minatar", "atari"],
)
def test_a_network_says_its_layers_truthfully(network, shape):
    layers, params = layers_that_run(network, np.zeros((1, *shape), np.uint8))
    assert list(layers.items()) == list(network.layers.items())
    assert set(params["params"]) == set(layers)


def test_the_network_is_the_published_one():
    env = MinAtarEnv("Breakout", 10)
    observations = env.reset(seed=0)[0][None]
    params = QNetwork((16, 128), len(env.action_set)).init(jax.random.key(0), observations)["params"]
    assert params["Conv_0"]["kernel"].shape == (3, 3, 4, 16)
    assert params["Dense_0"]["kernel"].shape == (8 * 8 * 16, 128)  # no padding: 10 x 10 become 8 x 8
    assert sum(x.size for x in jax.tree.leaves(params)) == 132_179
    assert eaudedqn_minatar.Args().features == polyprune_dqn_minatar.Args().features == (16, 128)


def test_q_values_by_hand():
    """A convolution without padding at stride 1, ReLU, a hidden layer, ReLU, an output, in NumPy."""
    rng = np.random.default_rng(0)
    network, observations = QNetwork((3, 5), 4), rng.integers(0, 2, (6, 10, 10, 7)).astype(np.uint8)
    params = network.init(jax.random.key(0), observations)
    params = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), params)
    (conv, dense, output) = (params["params"][name] for name in ("Conv_0", "Dense_0", "Dense_1"))
    windows = np.lib.stride_tricks.sliding_window_view(observations, (3, 3), axis=(1, 2))  # (6, 8, 8, 7, 3, 3)
    x = np.maximum(np.einsum("bxychw,hwco->bxyo", windows, conv["kernel"]) + conv["bias"], 0).reshape(6, -1)
    x = np.maximum(x @ dense["kernel"] + dense["bias"], 0) @ output["kernel"] + output["bias"]
    np.testing.assert_allclose(network.apply(params, observations), x, rtol=1e-4, atol=1e-3)


# ---- Training --------------------------------------------------------------------------------------------------------
class Paying:
    """A stand-in whose observations say which one they are. It pays 5 a step. One episode of 7 steps, the next of 4,
    which is cut. All that has happened is in `steps`, in the order of `GridMemory.add`."""

    def __init__(self, env_id, horizon):
        self.game, self.action_set = self, [0, 1, 2]
        self.numbers, self.seeds, self.steps = itertools.count(), [], []

    def state_shape(self):
        return list(SHAPE)

    def reset(self, seed):
        self.seeds.append(seed)
        self.n_steps, self.observation = 0, grid(next(self.numbers))
        if self.steps and (self.steps[-1][3] or self.steps[-1][4]):
            self.steps[-1][5] = self.observation
        return self.observation, {}

    def step(self, action):
        assert isinstance(action, int | np.integer)  # a resumed run replays those of its checkpoint
        assert 0 <= action < 3
        self.n_steps += 1
        terminal, truncation = self.n_steps == 7, self.n_steps == 4 and len(self.seeds) % 2 == 0
        observation, self.observation = self.observation, grid(next(self.numbers))
        self.steps.append([observation, action, 5, terminal, truncation, self.observation])
        return self.observation, 5, terminal, truncation, {}


@pytest.fixture
def paying(monkeypatch, tmp_path):
    """Flags of a short run, and the stand-ins that were made for it."""
    envs = []
    for script in (eaudedqn_minatar, polyprune_dqn_minatar):
        monkeypatch.setattr(script, "MinAtarEnv", lambda *inputs: envs.append(Paying(*inputs)) or envs[-1])
    flags = dict(runs_dir=tmp_path, features=(2, 4), learning_starts=40, batch_size=8, target_period=20)
    return flags | dict(gradient_period=4, checkpoint_period=0), envs


Call = collections.namedtuple("Call", "name n_added before after inputs")


def record(script, monkeypatch, names):
    """Run the real functions, and keep a `Call` of each. The memories are kept, too."""
    calls, memories, memory_class = [], [], script.GridMemory

    def recorder(name, function):
        def call(*inputs):
            before = next((jax.device_get(x) for x in inputs if isinstance(x, script.AgentState)), None)
            arrays = [jax.device_get(x) for x in inputs if not isinstance(x, script.AgentState)]
            result = function(*inputs)
            after = jax.device_get(result[0] if name == "learn" else result)
            calls.append(Call(name, memories[-1].n_added, before, after, arrays))
            return result

        return call

    class Recorded(memory_class):
        def __init__(self, *inputs, **saved):
            super().__init__(*inputs, **saved)
            memories.append(self)

    monkeypatch.setattr(script, "GridMemory", Recorded)
    for name in names:
        monkeypatch.setattr(script, name, recorder(name, getattr(script, name)))
    return calls, memories


def test_no_target_update_before_the_first_gradient_step(paying, monkeypatch):
    script, (flags, _) = eaudedqn_minatar, paying
    calls, _ = record(script, monkeypatch, ["learn", "prune_copies"])
    script.train(script.Args(**flags | dict(learning_starts=41, target_period=6), total_timesteps=54))
    expected = [("learn", 43), ("learn", 47), ("prune_copies", 48), ("learn", 51), ("prune_copies", 54)]
    assert [(call.name, call.n_added) for call in calls] == expected  # step 42 passes, step 44 is the first to learn


def test_actions_come_from_a_network_drawn_by_its_loss_and_from_epsilon(paying, monkeypatch):
    script, (flags, envs), drawn = eaudedqn_minatar, paying, []
    monkeypatch.setattr(
        script, "network_probabilities", lambda losses: drawn.append(np.array(losses)) or np.array([0.0, 0.0, 1.0])
    )
    check_actions(script, flags | dict(n_networks=3), envs, "behaviour_actions", monkeypatch)
    assert len(drawn) == 1_000  # at every step
    assert not np.any(drawn[:40])
    assert np.all(drawn[-1] > 0)


def test_actions_come_from_the_online_network_and_from_epsilon(paying, monkeypatch):
    check_actions(polyprune_dqn_minatar, *paying, "greedy_actions", monkeypatch)


def check_actions(script, flags, envs, name, monkeypatch):
    """Epsilon falls from 1 to 0.01 over 500 steps: about 252 of the first 500 actions are greedy, 495 of the others."""
    calls, _ = record(script, monkeypatch, ["learn", name])
    run = script.train(script.Args(**flags | dict(target_period=1_001), epsilon_duration=500, total_timesteps=1_000))
    greedy = {call.n_added + 1: call for call in calls if call.name == name}
    assert 215 < sum(step <= 500 for step in greedy) < 290
    assert 480 < sum(step > 500 for step in greedy) < 500
    assert scalars(run)["charts/epsilon"] == [(1_000, pytest.approx(0.01))]
    for step, call in greedy.items():
        observation, action, *_ = envs[0].steps[step - 1]
        assert call.after == [action]
        assert number_of(call.inputs[-1]) == number_of(observation)
        if name == "behaviour_actions":
            assert call.inputs[2] == 2
    for learning, acting in itertools.pairwise(calls):
        if (learning.name, acting.name) == ("learn", name):
            assert_trees_equal(acting.inputs[1], learning.after.params)  # those that learn, not the target's
    others = [x[1] for step, x in enumerate(envs[0].steps, 1) if step not in greedy]
    assert set(others) == {0, 1, 2}


@SCRIPTS
def test_a_run_that_diverges_stops_with_a_message(script, paying, monkeypatch, capsys):
    flags, _ = paying
    step = Paying.step
    monkeypatch.setattr(Paying, "step", lambda env, action: (lambda x: (x[0], np.nan, *x[2:]))(step(env, action)))
    with pytest.raises(SystemExit) as exit_info:
        script.main(script.Args(**flags, total_timesteps=100))
    assert exit_info.value.code == 2
    who = "all networks have" if script is eaudedqn_minatar else "the network has"
    assert capsys.readouterr().err == f"error: {who} diverged by step 60; try a lower --learning-rate\n"


@SCRIPTS
def test_a_run_without_anything_learned_says_so(script, paying, capsys, monkeypatch):
    flags, _ = paying
    with monkeypatch.context() as patch:
        stop_after(59, script, patch)  # step 44 is the first to learn, 60 the first target update after it
        with pytest.raises(SystemExit):
            script.train(script.Args(**flags, total_timesteps=60))
    assert "The policy is an untrained network: " in capsys.readouterr().out
    script.train(script.Args(**flags, total_timesteps=60))
    assert "The policy is an untrained network: " not in capsys.readouterr().out


@SCRIPTS
def test_what_is_logged_after_a_stop_was_learned_before(script, paying, tmp_path, monkeypatch):
    flags, _ = paying
    monkeypatch.setattr(script, "LOG_PERIOD", 10)
    with monkeypatch.context() as patch:
        stop_after(69, script, patch)  # the step after a gradient step, of which there is none before 72
        with pytest.raises(SystemExit):
            script.train(script.Args(**flags | dict(checkpoint_period=100), total_timesteps=100))
    (run,) = tmp_path.iterdir()
    script.train(script.Args(resume=run))
    assert [step for step, _ in scalars(run)["losses/td_loss"]] == list(range(50, 101, 10))


def spoil(state, k):
    """Network k gets weights that are not finite, and the lowest loss."""
    params = jax.tree.map(lambda x: x.at[k].set(np.nan), state.params)
    return state._replace(params=params, cumulated_losses=state.cumulated_losses.at[k].set(1e-9))


def test_a_network_whose_weights_are_not_finite_is_replaced_whatever_its_loss(paying, monkeypatch):
    script, (flags, _), learn = eaudedqn_minatar, paying, eaudedqn_minatar.learn

    def spoiled(*inputs):
        state, metrics = learn(*inputs)
        return spoil(state, 2), metrics

    monkeypatch.setattr(script, "learn", spoiled)
    calls, _ = record(script, monkeypatch, ["prune_copies"])
    script.train(script.Args(**flags, total_timesteps=60))
    ((_, _, before, after, inputs),) = calls
    assert 2 not in inputs[2]  # the parents
    for params in (before.target_params, after.params):
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(params))


# ---- Whole runs ------------------------------------------------------------------------------------------------------
RESUMED = "--total-timesteps 1000 --checkpoint-period 300 --batch-size 8 --horizon 40 --features 2 4 --buffer-size 200"
RESUMED += " --learning-starts 100 --gradient-period 3 --target-period 60 --epsilon-duration 400"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "flags"),
    [
        (eaudedqn_minatar, f"--env-id Asterix {RESUMED} --n-networks 3 --tournament-size 2"),
        (polyprune_dqn_minatar, f"--env-id SpaceInvaders {RESUMED} --pruning-period 50"),
    ],
    ids=["eaudedqn", "polyprune"],
)
def test_a_run_that_was_killed_ends_as_one_that_was_not(script, flags, tmp_path):
    killed = start(tmp_path, script, f"{flags} --runs-dir killed", f"SIGKILL {script.__name__}.save_is_due 777")
    assert killed.returncode == -9, killed.stderr
    (run,) = (tmp_path / "killed").iterdir()
    about, arrays = checkpoint(run)
    assert (about["step"], len(arrays["memory/rows"])) == (600, 201)  # the memory has wrapped around
    assert len(arrays["episode/actions"]) > 0  # in the middle of an episode
    for arguments in (f"--resume {run.relative_to(tmp_path)}", f"{flags} --runs-dir never"):
        result = start(tmp_path, script, arguments)
        assert (result.returncode, result.stderr) == (0, "")
    (never,) = (tmp_path / "never").iterdir()
    assert_same_results(run, never)
    curves = scalars(never)
    assert curves["sparsity/target"][-1][1] > 0
    assert 40 in [length for _, length in curves["charts/episodic_length"]]  # some were cut
    assert sorted(path.name.split(".")[0] for path in never.iterdir()) == ["args", "events", "policy"]


BREAKOUT = dict(env_id="Breakout", features=(8, 32), total_timesteps=9_000, learning_starts=500, epsilon_duration=3_000)
BREAKOUT |= dict(target_period=200, gradient_period=1, learning_rate=1e-3, checkpoint_period=0)


def mean_return(run, first_step):
    return np.mean([value for step, value in scalars(run)["charts/episodic_return"] if step > first_step])


@pytest.mark.slow
def test_dense_dqn_learns_breakout(tmp_path):
    script = polyprune_dqn_minatar
    run = script.train(script.Args(runs_dir=tmp_path, final_sparsity=0.0, **BREAKOUT))
    assert mean_return(run, 6_000) > 2  # random play gets 0.4
    assert all(np.count_nonzero(x) == x.size for name, x in final_weights(run).items() if name.endswith("kernel"))


@pytest.mark.slow
def test_eaudedqn_learns_breakout_while_its_sparsity_grows(tmp_path):
    script = eaudedqn_minatar
    args = script.Args(runs_dir=tmp_path, n_networks=3, tournament_size=2, max_speed=0.1, **BREAKOUT)
    run = script.train(args)
    assert mean_return(run, 6_000) > 2
    sparsities = [value for _, value in scalars(run)["sparsity/target"]]
    assert sparsities[0] == 0
    assert sparsities[len(sparsities) // 2] > 0.05
    assert sparsities[-1] > 0.25
