"""How `train` connects its parts: what reaches whom, and that what is saved and evaluated is the agent.

Each script runs once, in a tiny world, with all its flags off their defaults. Spies keep what its functions, its
environment and its optimizer are given, and what they give back.
"""

import dataclasses
import functools
import importlib
import inspect
import itertools
import shutil
from typing import NamedTuple

import jax
import mujoco_probe
import numpy as np
import optax
import pytest
from common import assert_trees_equal, at, scalars
from gymnasium.spaces import Discrete
from test_replay_data import PADDING, write_file

N_ACTIONS, PAYS = 3, (5.0, -3.0, 0.25)
N_FILES, N_ROWS, KEPT_ROWS = 7, 30, 20
TYPED = {"Breakout": "ALE/Breakout-v5", "Asterix": "asterix", "Probe-v5": "probe"}  # what a person may type


# ---- Tiny worlds -----------------------------------------------------------------------------------------------------
@functools.lru_cache(None)
def picture(number, *shape):
    """Noise, but for two pixels that say which one it is."""
    x = np.random.RandomState(number).randint(0, 256, shape).astype(np.uint8)
    x.flat[:2] = divmod(number, 200)
    return x


def number_of(x):
    return int(x.flat[0]) * 200 + int(x.flat[1])


class Paying:
    """Pays 5, -3, 0.25, 5, ... An episode has 7 steps, but every second one is cut after 4. All games of a batch are
    alike, but for their pictures. `steps` are (picture, action, reward, terminal, truncation, next picture)."""

    def __init__(self, n_envs=1):
        self.n_envs, self.numbers, self.seeds, self.steps, self.actions = n_envs, itertools.count(1), [], [], []

    def start(self, seed):
        self.seeds.append(seed)
        self.n_steps = 0
        self.seen = [next(self.numbers) for _ in range(self.n_envs)]

    def advance(self, actions):
        before, reward = self.seen[0], PAYS[self.n_steps % 3]
        self.n_steps += 1
        terminal, truncation = self.n_steps == 7, self.n_steps == 4 and len(self.seeds) % 2 == 0
        self.seen = [next(self.numbers) for _ in range(self.n_envs)]
        self.steps.append((before, int(actions[0]), reward, terminal, truncation, self.seen[0]))
        self.actions.append(np.array(actions))
        return reward, terminal, truncation


class PayingAtari(Paying):
    """The part of `ale_py.AtariVectorEnv` that the scripts use."""

    single_action_space = Discrete(N_ACTIONS)

    def reset(self, seed):
        self.start(seed)
        self.stack = np.zeros((self.n_envs, 4, 84, 84), np.uint8)
        return self.observe(), {}

    def observe(self):
        frames = [picture(x, 84, 84) for x in self.seen]
        self.stack = np.concatenate([self.stack[:, 1:], np.stack(frames)[:, None]], axis=1)
        return self.stack

    def step(self, actions):
        reward, *ends = [np.full(self.n_envs, x) for x in self.advance(actions)]
        return self.observe(), reward + np.arange(self.n_envs), *ends, {}


class PayingGrid(Paying):
    """The part of `MinAtarEnv` that the scripts use."""

    action_set = range(N_ACTIONS)

    @property
    def game(self):
        return self

    def state_shape(self):
        return [10, 10, 4]

    def reset(self, seed):
        self.start(seed)
        return picture(self.seen[0], 10, 10, 4), {}

    def step(self, action):
        ends = self.advance([action])
        return picture(self.seen[0], 10, 10, 4), *ends, {}


def write_data(folder):
    """Files of endless play, whose frames say their file and row: 100 x file + row."""
    folder.mkdir()
    for number in range(N_FILES):
        rows = [PADDING] * 3
        for i in range(3, N_ROWS):
            rows.append((picture(100 * number + i, 84, 84), i % N_ACTIONS, PAYS[i % 3], i == 15))
            rows += [PADDING] * 3 if i == 15 else []
        write_file(folder, number, rows[:N_ROWS])
    return folder


# ---- Flags -----------------------------------------------------------------------------------------------------------
ALL = dict(seed=7, checkpoint_period=35, batch_size=6, gamma=0.7, learning_rate=4e-3, adam_epsilon=1e-3)
ALL |= dict(sparsity_distribution="global")
ONLINE = ALL | dict(total_timesteps=150, learning_starts=42, buffer_size=60)
DQN = ONLINE | dict(horizon=99, target_period=20, gradient_period=3, epsilon_end=0.3, epsilon_duration=100)
ATARI = DQN | dict(env_id="Breakout", features=(2, 3, 4, 5))
MINATAR = DQN | dict(env_id="Asterix", features=(2, 5))
OFFLINE = ALL | dict(env_id="Breakout", total_timesteps=150, horizon=99, features=(2, 3, 4, 5), target_period=20)
OFFLINE |= dict(
    cql_alpha=0.3, kept_rows=KEPT_ROWS, files_in_memory=2, epoch_steps=40, eval_episodes=8, eval_epsilon=0.5
)
SCHEDULE = dict(pruning_power=2, pruning_start=0.1, pruning_end=0.95, pruning_period=14)
MUJOCO = ONLINE | SCHEDULE | dict(env_id="Probe-v5", critic_features=(6,), actor_features=(5, 4), tau=0.2, utd=2)
MUJOCO |= dict(actor_final_sparsity=0.4, policy_delay=3, eval_period=28, eval_episodes=3)
EAUDE, POLYPRUNE = dict(n_networks=6, tournament_size=4, max_noise=40.0, max_speed=0.3), dict(final_sparsity=0.6)
FLAGS = {
    "eaudedqn_atari": ATARI | EAUDE,
    "eaudecql_atari": OFFLINE | EAUDE,
    "eaudesac_mujoco": MUJOCO | EAUDE,
    "eaudedqn_minatar": MINATAR | EAUDE,
    "polyprune_dqn_atari": ATARI | SCHEDULE | POLYPRUNE,
    "polyprune_cql_atari": OFFLINE | SCHEDULE | POLYPRUNE,
    "polyprune_sac_mujoco": MUJOCO | POLYPRUNE,
    "polyprune_dqn_minatar": MINATAR | SCHEDULE | POLYPRUNE,
}


# ---- Spies -----------------------------------------------------------------------------------------------------------
class Call(NamedTuple):
    name: str
    step: int  # of the run
    inputs: dict  # by name
    result: object


LEARN, PRUNE = ("learn", "learn_many"), ("prune", "prune_copies", "prune_critics", "prune_critic_copies", "prune_actor")
ACT, EVALUATE = ("behaviour_actions", "greedy_actions", "policy_actions"), ("evaluate", "evaluate_actor")
OTHERS = "init_agent", "select_population", "magnitude_masks", "next_sparsity", "polynomial_sparsity", "read_rows"
OTHERS += "write_npz", "make_env", "network_probabilities", "checked_losses", "load_file"
MEMORIES = "ReplayMemory", "GridMemory", "TransitionMemory", "ReplayData"


class Seen:
    """One run of a script: the calls of its functions, in the order in which they ended."""

    def __init__(self, name, folder, monkeypatch):
        self.script = script = importlib.import_module(name)
        self.population, self.mujoco = name.startswith("eaude"), name.endswith("mujoco")
        self.offline = hasattr(script, "ReplayData")
        self.calls, self.envs, self.seeds, self.adams, self.taus, self.resumed = [], [], [], [], [], []
        self.run, self.memory, self.copies = None, None, folder / "copies"
        self.due = set()  # steps, or periods of them, at which a call of many updates has to end
        self.patch(monkeypatch)
        data = {"dataset_dir": write_data(folder / "data")} if self.offline else {}
        self.args = script.Args(runs_dir=folder / "elsewhere", **data, **FLAGS[name])
        self.folder = script.train(dataclasses.replace(self.args, env_id=TYPED[self.args.env_id]))
        self.curves = scalars(self.folder)

    def patch(self, monkeypatch):
        script = self.script
        if self.mujoco:
            start, pays = mujoco_probe.Probe.__init__, itertools.count(PAYS[0])
            monkeypatch.setattr(mujoco_probe.Probe, "__init__", lambda env: start(env, reward=next(pays)))
        else:
            stub = PayingGrid if hasattr(script, "MinAtarEnv") else PayingAtari

            def make_env(env_id, n_envs, horizon):
                self.envs.append(stub(n_envs))
                return self.envs[-1]

            monkeypatch.setattr(script, "make_env", make_env, raising=False)
            if hasattr(script, "MinAtarEnv"):
                monkeypatch.setattr(script, "MinAtarEnv", lambda env_id, horizon: script.make_env(env_id, 1, horizon))
        if hasattr(script, "checked_losses"):
            monkeypatch.setattr(script, "checked_losses", suspicious(script.checked_losses))
        for function in (*OTHERS, *EVALUATE, *ACT, *PRUNE, "learn_many" if self.offline else "learn"):
            if hasattr(script, function):
                self.spy(monkeypatch, function)
        self.note_objects(monkeypatch, script.Run, "run")
        self.note_objects(monkeypatch, next(getattr(script, x) for x in MEMORIES if hasattr(script, x)), "memory")
        if self.offline:
            divisor = script.updates_per_call
            monkeypatch.setattr(script, "updates_per_call", lambda *steps: self.due.update(steps) or divisor(*steps))
        adam, average, new_rng = optax.adam, optax.incremental_update, np.random.default_rng
        monkeypatch.setattr(optax, "adam", lambda rate, eps: self.adams.append((rate, eps)) or adam(rate, eps=eps))
        monkeypatch.setattr(optax, "incremental_update", lambda *x: self.taus.append(x[2]) or average(*x))
        monkeypatch.setattr(np.random, "default_rng", lambda seed: self.seeds.append(seed) or new_rng(seed))
        monkeypatch.setattr(script, "LOG_PERIOD", 1)

    def note_objects(self, monkeypatch, kind, name):
        start = kind.__init__
        monkeypatch.setattr(kind, "__init__", lambda x, *i, **n: setattr(self, name, x) or start(x, *i, **n))

    def spy(self, monkeypatch, name):
        function = getattr(self.script, name)
        parameters = list(inspect.signature(function).parameters)

        def call(*inputs, **named):
            given = {key: host(x) for key, x in [*zip(parameters, inputs), *named.items()]}
            result = function(*inputs, **named)
            self.calls.append(Call(name, self.run.step if self.run else 0, given, host(result)))
            if name == "write_npz" and given["path"].name == "checkpoint.npz":
                copy = self.copies / str(len(self.resumed)) / given["path"].parent.name  # nobody is at work on it
                shutil.copytree(given["path"].parent, copy, ignore=shutil.ignore_patterns("*.lock"))
                self.resumed.append((copy, self.script.load_args(self.script.Args(resume=copy))))
            return result

        monkeypatch.setattr(self.script, name, call)

    def of(self, *names):
        return [call for call in self.calls if call.name in names]

    def given(self, name, parameter):
        return {call.inputs[parameter] for call in self.of(name)}

    def flags_of_learn(self, flag):
        return {getattr(call.inputs["args"], flag) for call in self.of(*LEARN)}

    def periods(self, *names):
        """Steps from one call of a function to its next one."""
        return {int(x) for name in names for x in np.diff(sorted({call.step for call in self.of(name)})) if x}


def suspicious(checked_losses):
    """At every second call it finds that the network of the lowest loss has diverged."""
    numbers = itertools.count()

    def call(state, step):
        losses = np.array(checked_losses(state, step))
        if next(numbers) % 2:
            losses[losses.argmin()] = np.inf
        return losses

    return call


def host(x):
    """Arrays of JAX as NumPy's, for their memory may be donated."""
    return jax.device_get(x) if isinstance(x, dict | tuple) else x


@pytest.fixture(scope="module", params=FLAGS)
def seen(request, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        return Seen(request.param, tmp_path_factory.mktemp(request.param), monkeypatch)


# ---- Every flag reaches what it names --------------------------------------------------------------------------------
def close(found, value, tolerance):
    """What is drawn at random says about which value it has."""
    return {value} if abs(found - value) < tolerance else {found}


def largest_noise(seen):
    return close(max(seen.given("next_sparsity", "noise")), seen.args.max_noise, 0.2 * seen.args.max_noise)


def checkpoints(seen):
    return [call for call in seen.of("write_npz") if call.inputs["path"].name == "checkpoint.npz"]


def batches(seen):
    """[(step, batch)] of all gradient steps. A call has one batch, or several that are stacked."""
    found = []
    for call in seen.of(*LEARN):
        if "batch" in call.inputs:
            stacked = at(call.inputs["batch"], None)
        else:
            stacked = call.inputs["draws"].batches if seen.mujoco else call.inputs["batches"]
        found += [(call.step, at(stacked, i)) for i in range(len(stacked.actions))]
    return found


def sparsities_of_schedules(seen):
    return seen.given("polynomial_sparsity", "final_sparsity")


def share_of_random_actions(seen):
    """One in three of them is the greedy one."""
    greedy = np.concatenate([call.result for call in seen.of("greedy_actions")])
    played = np.concatenate([x for env in seen.envs if env.n_envs > 1 for x in env.actions])
    return close(np.mean(greedy != played) * 1.5, seen.args.eval_epsilon, 0.12)


def epsilon(seen):
    """Of the curve: its end, and where it is reached. And as many actions are greedy."""
    steps, values = np.array(seen.curves["charts/epsilon"]).T
    line = np.interp(steps, (0, steps[values == values[-1]][0]), (1, values[-1]))
    np.testing.assert_allclose(values, line, rtol=1e-5)
    expected, n_greedy = 1 - values, len(seen.of("behaviour_actions", "greedy_actions"))
    assert seen.of("behaviour_actions", "greedy_actions")[0].step < seen.args.learning_starts
    assert abs(n_greedy - expected.sum()) < 3 * np.sqrt((expected * values).sum())
    return round(float(values[-1]), 6), int(steps[values == values[-1]][0])


WHERE = {  # it must be seen: all values that are found there
    "env_id": lambda s: {s.folder.name.split("__")[0]} | s.given("make_env", "env_id"),
    "seed": lambda s: {*s.seeds, int(jax.random.key_data(s.of("init_agent")[0].inputs["key"])[-1])},
    "total_timesteps": lambda s: (
        {s.run.step, *(len(env.steps) for env in s.envs[:1] if not s.offline)}
        | (s.given("next_sparsity" if s.population else "polynomial_sparsity", "total_steps"))
    ),
    "runs_dir": lambda s: {s.folder.parent},
    "checkpoint_period": lambda s: set(np.diff([0, *(x.inputs["about"]["step"] for x in checkpoints(s))])),
    "resume": lambda s: {s.folder if args.resume == copy else args.resume for copy, args in s.resumed},
    "horizon": lambda s: s.given("make_env", "horizon"),
    "features": lambda s: {x.features for x in s.given("init_agent", "network")},
    "critic_features": lambda s: {x.features for x in s.given("init_agent", "critic")},
    "actor_features": lambda s: {x.features for x in s.given("init_agent", "actor")},
    "n_networks": lambda s: (
        {s.of("init_agent")[0].result.cumulated_losses.shape[-1]}
        | {len(call.inputs["losses"]) for call in s.of("select_population")}
    ),
    "tournament_size": lambda s: s.given("select_population", "tournament_size"),
    "max_noise": largest_noise,
    "max_speed": lambda s: s.given("next_sparsity", "max_speed"),
    "final_sparsity": lambda s: sparsities_of_schedules(s) - {getattr(s.args, "actor_final_sparsity", None)},
    "actor_final_sparsity": lambda s: sparsities_of_schedules(s) - {getattr(s.args, "final_sparsity", None)},
    "pruning_power": lambda s: s.given("polynomial_sparsity", "power"),
    "pruning_start": lambda s: s.given("polynomial_sparsity", "start"),
    "pruning_end": lambda s: s.given("polynomial_sparsity", "end"),
    "pruning_period": lambda s: s.periods(*PRUNE),
    "sparsity_distribution": lambda s: s.given("magnitude_masks", "distribution"),
    "target_period": lambda s: set(np.diff([step for step, _ in s.curves["sparsity/target"]])),
    "gradient_period": lambda s: s.periods(*LEARN),
    "learning_starts": lambda s: (
        {s.of(*LEARN)[0].step - getattr(s.args, "gradient_period", 1)}
        | {s.curves["charts/SPS"][0][0] - 101}  # the clock starts once updates have run for a while
    ),
    "buffer_size": lambda s: {getattr(s.memory, "size", len(s.memory.rows))},
    "batch_size": lambda s: {len(batch.actions) for _, batch in batches(s)},
    "gamma": lambda s: s.flags_of_learn("gamma"),
    "cql_alpha": lambda s: s.flags_of_learn("cql_alpha"),
    "tau": lambda s: {*s.taus} | s.flags_of_learn("tau"),
    "learning_rate": lambda s: {rate for rate, _ in s.adams},
    "adam_epsilon": lambda s: {eps for _, eps in s.adams},
    "epsilon_end": lambda s: {epsilon(s)[0]},
    "epsilon_duration": lambda s: {epsilon(s)[1]},
    "utd": lambda s: {len(call.inputs["draws"].batches.actions) for call in s.of("learn")},
    "policy_delay": lambda s: set(np.diff([call.step for call in s.of("learn") if call.inputs["with_actor"]])),
    "eval_period": lambda s: s.periods("evaluate_actor"),
    "eval_episodes": lambda s: (
        {len(x.inputs["envs"]) for x in s.of("evaluate_actor")}
        | (s.given("make_env", "n_envs") - {1} if s.offline else set())
    ),
    "eval_epsilon": share_of_random_actions,
    "dataset_dir": lambda s: {path.parent for path in s.given("read_rows", "path")},
    "kept_rows": lambda s: s.given("read_rows", "n_rows"),
    "files_in_memory": lambda s: {len(files) for files in files_by_epoch(s)},
    "epoch_steps": lambda s: s.periods("evaluate"),
}


def test_every_flag_reaches_what_it_names(seen):
    flags = vars(seen.args) | {"resume": seen.folder}
    assert not [x.name for x in dataclasses.fields(seen.args) if x.default == flags[x.name]]
    assert flags.keys() <= WHERE.keys()
    assert {name: WHERE[name](seen) for name in flags} == {name: {value} for name, value in flags.items()}
    assert seen.resumed == [(copy, dataclasses.replace(seen.args, resume=copy)) for copy, _ in seen.resumed]
    assert len(seen.resumed) == 4
    assert len(seen.seeds) == 1  # one generator for all: a second one would draw the same again


# ---- What is learned, saved and evaluated ----------------------------------------------------------------------------
def walk(seen):
    """Each call, with the state that the algorithm has by then: `learn` and `prune` change it, the target update that
    comes between them, the reset of the cumulated losses after a tournament, and nothing else."""
    state = seen.of("init_agent")[0].result
    period = seen.args.total_timesteps + 1 if seen.mujoco else seen.args.target_period
    next_update = period
    for call in seen.calls:
        after_update = call.name in (*PRUNE, *EVALUATE, "write_npz") or (seen.offline and call.name in ACT)
        while call.step > next_update or (call.step == next_update and after_update):
            state, next_update = update_target(seen, state, next_update), next_update + period
        yield call, state
        if call.name in LEARN:
            state, _ = call.result
        elif call.name in PRUNE:
            state = call.result
            if "parents" in call.inputs:
                state = state._replace(cumulated_losses=0 * state.cumulated_losses)


def compared_losses(seen, state, step):
    """What a tournament is decided by: on MuJoCo `learn` itself sees to networks that have diverged."""
    checked = (call.result for call in seen.of("checked_losses") if call.step == step)
    return state.cumulated_losses if seen.mujoco else next(checked)


def update_target(seen, state, step):
    """Alg. 1, l. 13, if a gradient step came before."""
    if seen.population and not state.cumulated_losses.any():
        return state
    if seen.population:
        return state._replace(target_params=at(state.params, compared_losses(seen, state, step).argmin()))
    fresh = {"cumulated_loss": 0 * state.cumulated_loss} if hasattr(state, "cumulated_loss") else {}
    return state._replace(target_params=state.params, **fresh)


def pair(seen, params, idx):
    """A network of each of the two critics."""
    places = [(i, idx[i]) if seen.population else i for i in range(2)]
    return {f"critic_{i}": at(params, places[i]) for i in range(2)}


def differs(left, right):
    return any((x != y).any() for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right)))


def test_each_call_is_given_the_state_of_the_algorithm(seen):
    for call, state in walk(seen):
        given = call.inputs
        if call.name in LEARN + PRUNE:
            assert given["args"] == seen.args
            assert given.get("step", call.step) == call.step
            assert_trees_equal(given["state"], state)
        if "parents" in given:
            tournaments = [x for x in seen.of("select_population") if x.step == call.step]
            np.testing.assert_array_equal(given["parents"], np.squeeze([x.result for x in tournaments]))
            losses = np.squeeze([x.inputs["losses"] for x in tournaments])
            np.testing.assert_array_equal(losses, compared_losses(seen, state, call.step))
        if call.name == "checked_losses":
            assert_trees_equal(given["state"], state)
            assert np.isin(call.result, [*state.cumulated_losses, np.inf]).all()
        if call.name == "next_sparsity":
            period = seen.args.pruning_period if seen.mujoco else seen.args.target_period
            assert (given["step"], given["next_step"]) == (call.step, call.step + period)
        if call.name == "network_probabilities":
            np.testing.assert_array_equal(given["losses"], state.cumulated_losses)
        if call.name == "write_npz" and given["path"].name == "checkpoint.npz":
            assert_trees_equal(given["tree"]["state"], state)


def test_networks_that_learn_act_and_the_agent_is_evaluated(seen):
    n_evaluations = 0
    for call, state in walk(seen):
        if call.name in ACT + EVALUATE:
            plays = state.actor_params if seen.mujoco else state.target_params if seen.offline else state.params
            assert_trees_equal(call.inputs["params"], plays)
        n_evaluations += call.name in EVALUATE
    assert n_evaluations == (3 if seen.offline else 5 if seen.mujoco else 0)


def test_what_is_saved_is_the_agent(seen):
    """The target; on MuJoCo the actor and of each critic the network with the lowest loss, as it learns."""
    idx, steps, policy = [0, 0], [], None
    for call, state in walk(seen):
        if call.name in LEARN and seen.mujoco and seen.population:
            idx = call.result[0].cumulated_losses.argmin(axis=1)
        if call.name == "write_npz" and call.inputs["path"].name == "policy.npz":
            actor = {"actor": state.actor_params} if seen.mujoco else {"target": state.target_params}
            policy = actor | (pair(seen, state.params, idx) if seen.mujoco else {})
            assert_trees_equal(call.inputs["tree"], policy)
            steps.append(call.inputs["about"]["step"])
    assert steps == [35, 70, 105, 140, 150]
    about, arrays = seen.script.read_npz(seen.folder / "policy.npz")
    assert (about["step"], about["script"]) == (150, seen.script.__name__)
    assert_trees_equal(arrays, {name: x + 0 for name, x in seen.script.arrays_by_name(policy).items()})
    for name, network in policy.items():
        kernels = [x for x in jax.tree.leaves(network) if x.ndim > 1]
        assert about["sparsity"][name] == pytest.approx(np.mean(np.concatenate([x.ravel() for x in kernels]) == 0))
        dense = {layer: {"kind": "dense"} for layer in network["params"]}
        assert about["layers"][name] == (dense if seen.mujoco else seen.script.QNetwork.layers)

    # A run in which another network is the same would prove nothing.
    first = seen.of("init_agent")[0].result
    if seen.mujoco:
        assert np.any(idx) == seen.population
        others = [pair(seen, state.target_params, idx), pair(seen, first.params, idx)]
        assert all(differs(policy["critic_0"], x["critic_0"]) for x in others)
        assert differs(policy["actor"], first.actor_params)
    else:
        networks = range(seen.args.n_networks) if seen.population else [slice(None)]
        others = [at(x, k) for x in (state.params, first.params) for k in networks]
        assert all(differs(policy["target"], x) for x in others)


def n_distinct(params):
    """Different networks of a population."""
    leaves = jax.tree.leaves(host(params))
    return len({b"".join(x[k].tobytes() for x in leaves) for k in range(len(leaves[0]))})


def expected_curves(seen):
    """Of the networks: (step, tag, value) or, if each network has a curve, (step, tag, values)."""
    for call, state in walk(seen):
        if "parents" in call.inputs and not seen.mujoco:
            losses = compared_losses(seen, state, call.step)
            yield call.step, "sparsity/target", state.sparsities[losses.argmin()]
            yield call.step, "sparsity/network", state.sparsities
            yield call.step, "losses/cumulated", losses
            yield call.step, "population/parent", call.inputs["parents"]
            yield call.step, "population/distinct", n_distinct(call.result.params)
        elif "parents" in call.inputs:
            for i in range(2):
                yield call.step, f"sparsity/critic_{i}/network", state.sparsities[i]
                yield call.step, f"losses/critic_{i}/cumulated", state.cumulated_losses[i]
            best = state.cumulated_losses.argmin(axis=1)
            yield call.step, "sparsity/target", state.sparsities[[0, 1], best].mean()
            distinct = [n_distinct(at(call.result.params, i)) for i in range(2)]
            yield call.step, "population/distinct", np.array(distinct)
        elif call.name in ("prune", "prune_critics"):
            yield call.step, "sparsity/target" if seen.mujoco else "sparsity/network", call.result.sparsity
        elif call.name == "learn_many" and not seen.population and call.step % seen.args.target_period == 0:
            yield call.step, "sparsity/target", state.sparsity
            yield call.step, "losses/cumulated", call.result[0].cumulated_loss
    if not (seen.population or seen.mujoco or seen.offline):  # as it was before a pruning of the same step
        pruned = [(0, 0.0), *((call.step, call.result.sparsity) for call in seen.of("prune"))]
        for step in range(seen.args.target_period, seen.run.step + 1, seen.args.target_period):
            yield step, "sparsity/target", [x for when, x in pruned if when < step][-1]
    for call in seen.of("prune_actor"):
        yield call.step, "sparsity/actor", seen.script.sparsity_of(call.result.actor_masks)
    metrics, learned = {}, {call.step: call.result[1] for call in seen.of(*LEARN)}
    for step in range(1, seen.run.step + 1):  # those of the last update, or of the last one of the actor
        metrics |= learned.get(step, {})
        for tag, value in metrics.items():
            yield step, tag, value


def test_curves_show_the_networks(seen):
    expected = {}
    for step, tag, values in expected_curves(seen):
        for k, value in enumerate(np.ravel(values)):
            expected.setdefault(f"{tag}_{k}" if np.ndim(values) else tag, []).append((step, pytest.approx(value)))
    assert len(expected) > 0
    if seen.population:  # two copies of one parent that both reach the cap are one network
        assert len({value for tag, points in seen.curves.items() if "distinct" in tag for _, value in points}) > 1
    for tag, points in expected.items():
        assert seen.curves[tag] == points


# ---- What comes from the world ---------------------------------------------------------------------------------------
def files_by_epoch(seen):
    """The numbers of the files that the batches of each epoch came from."""
    epochs = [set() for _ in range(0, seen.args.total_timesteps, seen.args.epoch_steps)]  # of the last one a part
    for step, batch in batches(seen):
        epochs[(step - 1) // seen.args.epoch_steps] |= {number_of(frames[3]) // 100 for frames in batch.frames}
    return epochs


def transition_of(seen, batch, i):
    """What row i of a batch says of itself: (observation, action, reward, terminal, next observation)."""
    observations = [batch.observations[i], batch.next_observations[i]]
    if seen.mujoco:
        before, after = [(int(episode), int(n_steps)) for episode, n_steps in observations]
    else:
        before, after = [number_of(x[-1] if x.shape == (4, 84, 84) else x) for x in observations]
    return before, batch.actions[i], batch.rewards[i], bool(batch.terminals[i]), after


def what_happened(seen, before):
    """(number of the step, the transition that began with this observation)"""
    if seen.offline:
        row = before % 100
        assert row < KEPT_ROWS
        return None, (before, row % N_ACTIONS, np.clip(PAYS[row % 3], -1, 1), row == 15, before + 1)
    if seen.mujoco:
        episode, n_steps = before
        index = 5 * episode + n_steps
        action = (seen.of("make_env")[0].result.unwrapped.actions[index] - 1) / 3  # scaled to -2 to 4
        terminal = n_steps == 4 and episode % 2 == 0
        return index, (before, pytest.approx(action, abs=1e-5), PAYS[0], terminal, (episode, n_steps + 1))
    steps = seen.envs[0].steps
    index = [x[0] for x in steps].index(before)
    _, action, reward, terminal, truncation, after = steps[index]
    assert not truncation  # nobody has seen what followed
    return index, (before, action, np.clip(reward, -1, 1), terminal, after)


def test_what_is_learned_from_is_what_happened(seen):
    """Rewards are clipped for learning, but not on MuJoCo."""
    for step, batch in batches(seen):
        for i in range(len(batch.actions)):
            *found, after = transition_of(seen, batch, i)
            index, (*expected, expected_after) = what_happened(seen, found[0])
            assert found == expected
            assert after == expected_after or (batch.terminals[i] and not seen.mujoco)
            if not seen.offline:  # the last ones; the newest is still in flight
                assert step - 1 - seen.args.buffer_size <= index < step - 1
    for (_, first), (_, second) in itertools.pairwise(batches(seen)):
        assert differs(first, second)  # within one step, too, if --utd is 2


def test_returns_are_those_of_the_game(seen):
    """Not clipped."""
    if seen.mujoco:
        ends = range(0, 151, 5)
    elif not seen.offline:
        ends = [0, *(step for step, x in enumerate(seen.envs[0].steps, 1) if x[3] or x[4])]
    if not seen.offline:
        scores = {5: 5 * PAYS[0]} if seen.mujoco else {7: 9.5, 4: 7.25}  # by length
        lengths = [(end, end - start) for start, end in itertools.pairwise(ends)]
        assert seen.curves["charts/episodic_length"] == lengths
        assert seen.curves["charts/episodic_return"] == [(end, scores[length]) for end, length in lengths]
        seeds = seen.of("make_env")[0].result.unwrapped.seeds if seen.mujoco else seen.envs[0].seeds
        assert len(seeds) == len(lengths) + 1  # each episode has its own
        assert np.diff(sorted(seeds)).min() > 1_000  # drawn, not counted: else all runs would play the same games
    if seen.offline or seen.mujoco:
        steps = sorted({call.step for call in seen.of(*EVALUATE)})
        score = 5 * (PAYS[0] + 2) if seen.mujoco else 9.5 + 7 * 3.5  # the mean of environments that pay 1 more each
        assert seen.curves["eval/episodic_return"] == [(step, score) for step in steps]
    if seen.offline:
        (seeds,) = zip(*(env.seeds for env in seen.envs if env.n_envs > 1))
        assert len(set(seeds)) == len(steps)  # each evaluation has its own


def test_each_epoch_has_other_files(seen):
    if seen.offline:
        assert all(not files & others for files, others in itertools.pairwise(files_by_epoch(seen)))
        assert seen.given("load_file", "n_actions") == {N_ACTIONS}  # others are of another game


def test_what_is_played_is_what_was_chosen_for_what_was_seen(seen):
    if seen.offline or seen.mujoco:
        return
    if seen.population:
        assert seen.given("behaviour_actions", "idx") == {*range(seen.args.n_networks)}
    for call in seen.of(*ACT):
        before, action, *_ = seen.envs[0].steps[call.step - 1]
        (observation,) = call.inputs["observations"]
        assert number_of(observation[-1] if len(observation) == 4 else observation) == before
        assert np.asarray(call.result).tolist() == [action]
    others = {x[1] for step, x in enumerate(seen.envs[0].steps, 1) if step not in {call.step for call in seen.of(*ACT)}}
    assert others == {0, 1, 2}


def test_calls_of_many_updates_end_where_something_is_due(seen):
    names = ["checkpoint_period", "target_period", "epoch_steps", "total_timesteps"]
    names += [] if seen.population else ["pruning_period"]
    assert seen.due == ({0, *(getattr(seen.args, name) for name in names)} if seen.offline else set())


def test_what_falls_on_one_step_comes_in_order(seen):
    """Acting, so that the action does not wait for the update; learning, pruning, evaluation, what is saved. `walk`
    sees where the target update is."""
    kinds = [() if seen.offline else ACT, LEARN, PRUNE, EVALUATE, ["write_npz"]]
    order = {name: i for i, names in enumerate(kinds) for name in names}
    evaluations = [call for call in seen.of("policy_actions") if np.ndim(call.inputs["observations"]) == 2]
    in_training = [call for call in seen.calls if not any(call is x for x in evaluations)]
    for _, calls in itertools.groupby(in_training, key=lambda call: call.step):
        places = [order[call.name] for call in calls if call.name in order]
        assert places == sorted(places)
