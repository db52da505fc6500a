"""No GPU is here, but what would run on one can be compiled for it up to the last step, and looked at."""

import importlib
import re

import jax
import numpy as np
import pytest

SCRIPTS = ["eaudedqn_atari", "polyprune_dqn_atari", "eaudecql_atari", "polyprune_cql_atari", "eaudesac_mujoco"]
SCRIPTS += ["polyprune_sac_mujoco", "eaudedqn_minatar", "polyprune_dqn_minatar"]


def sac_calls(script):
    args = script.Args(critic_features=(4,), actor_features=(4,), utd=2, batch_size=3)
    actor, critic = script.Actor((4,), 2), script.Critic((4,))
    zeros = np.zeros((2, 3), np.float32)
    batches = script.Transitions(np.zeros((2, 3, 5)), np.zeros((2, 3, 2)), zeros, np.zeros((2, 3, 5)), zeros)
    noise = [np.zeros((2, 3, 2), np.float32), np.zeros((3, 2), np.float32), np.zeros(2, np.float32)]
    draws = script.Draws(batches, *noise[: len(script.Draws._fields) - 1])
    state = script.init_agent(args, actor, critic, jax.random.key(0), np.zeros(5))
    calls = {
        "init_agent": (args, actor, critic, jax.random.key(0), np.zeros(5)),
        "learn": (args, actor, critic, state, draws, True),
        "policy_actions": (actor, state.actor_params, np.zeros(5), np.zeros(2)),
        "count_distinct": (jax.tree.map(lambda x: x[0], state.params),),
        "network_at": (state.params, (0, 1)),
        "next_critics": (args, state, np.array([[1, 1, 2, 3, 4]] * 2), state.masks, np.zeros((2, 5), np.float32)),
    }
    return {name: inputs for name, inputs in calls.items() if hasattr(script, name)}


def dqn_calls(script, name):
    atari = "minatar" not in name
    args = script.Args(features=(2, 3, 3, 4) if atari else (2, 4))
    network = script.QNetwork(args.features, 3)
    observations = np.zeros((6, 4, 84, 84) if atari else (6, 10, 10, 4), np.uint8)
    start = (args, network, jax.random.key(0), *([] if atari else [observations[:1]]))
    state = script.init_agent(*start)
    columns = np.zeros(6, np.int32), np.zeros(6, np.float32)
    if atari:
        batch = script.Batch(np.zeros((6, 5, 84, 84), np.uint8), *columns, np.zeros(6, bool))
    else:
        batch = script.Batch(observations, *columns, observations, np.zeros(6, bool))
    many = jax.tree.map(lambda x: np.stack([x, x]), batch)
    calls = {
        "init_agent": start,
        "learn": (args, network, state, batch),
        "learn_many": (args, network, state, many),
        "greedy_actions": (network, state.target_params, observations),
        "behaviour_actions": (network, state.params, 1, observations),
        "count_distinct": (state.params,),
        "network_at": (state.params, 1),
        "next_population": (args, state, np.array([1, 1, 2, 3, 4]), state.masks, np.zeros(5, np.float32)),
    }
    return {name: inputs for name, inputs in calls.items() if hasattr(script, name)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_all_that_is_compiled_can_be_compiled_for_a_gpu(name, monkeypatch):
    script = importlib.import_module(name)
    calls = sac_calls(script) if name.endswith("mujoco") else dqn_calls(script, name)
    compiled = {key for key, x in vars(script).items() if hasattr(x, "lower") and hasattr(x, "trace")}
    assert compiled <= calls.keys(), "a compiled function without a call in this test"
    update = "learn_many" if hasattr(script, "learn_many") else "learn"
    assert update in compiled
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # for the branch that is taken there
    jax.clear_caches()
    for key in sorted(compiled):
        text = getattr(script, key).trace(*calls[key]).lower(lowering_platforms=("cuda",)).as_text()
        assert "callback" not in text, key  # no step asks the host
        state = next((x for x in calls[key] if isinstance(x, script.AgentState)), None)
        n_donated = len(re.findall("tf.aliasing_output|jax.buffer_donor", text))
        if key == update:  # the new state takes the place of the old one
            assert n_donated == len(jax.tree.leaves(state))
        elif state:  # `next_population` and `next_critics`, to which masks and sparsities come from the host
            assert n_donated == len(jax.tree.leaves(state._replace(masks=None, sparsities=None)))
    jax.clear_caches()
