"""An update is compiled once: a second compilation takes seconds, in the middle of a run."""

import logging
import re

import jax
import mujoco_probe  # noqa: F401 (registers the task)
import pytest
from catch import CatchEnv
from common import TINY
from test_resume import write_data

import eaudecql_atari
import eaudedqn_atari
import eaudedqn_minatar
import eaudesac_mujoco
import polyprune_cql_atari
import polyprune_dqn_atari
import polyprune_dqn_minatar
import polyprune_sac_mujoco

ATARI = dict(features=TINY, batch_size=8, total_timesteps=100, target_period=20)
ONLINE = ATARI | dict(learning_starts=30, buffer_size=100)
OFFLINE = ATARI | dict(epoch_steps=50, eval_episodes=1)
MINATAR = ONLINE | dict(features=(2, 4))
MUJOCO = dict(env_id="Probe", total_timesteps=100, learning_starts=30, batch_size=8, pruning_period=20)
MUJOCO |= dict(critic_features=(8,), actor_features=(8,), actor_final_sparsity=0.5, eval_episodes=1, eval_period=50)
EAUDE = dict(n_networks=2, tournament_size=1)
CASES = {
    eaudedqn_atari: ("learn", ONLINE | EAUDE),
    polyprune_dqn_atari: ("learn", ONLINE | dict(pruning_period=20)),
    eaudedqn_minatar: ("learn", MINATAR | EAUDE),
    polyprune_dqn_minatar: ("learn", MINATAR | dict(pruning_period=20)),
    eaudecql_atari: ("learn_many", OFFLINE | EAUDE),
    polyprune_cql_atari: ("learn_many", OFFLINE | dict(pruning_period=20)),
    eaudesac_mujoco: ("learn", MUJOCO | EAUDE),
    polyprune_sac_mujoco: ("learn", MUJOCO),
}


@pytest.mark.parametrize("script", CASES, ids=lambda script: script.__name__)
def test_an_update_is_compiled_once(script, tmp_path, monkeypatch, caplog):
    update, flags = CASES[script]
    if script.__name__.endswith("_atari"):
        monkeypatch.setattr(script, "make_env", lambda env_id, n_envs, horizon: CatchEnv(n_envs))
    if "dataset_dir" in script.Args.__dataclass_fields__:
        write_data(tmp_path / "data", n_actions=3)
        flags = flags | dict(dataset_dir=tmp_path / "data")
    jax.clear_caches()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        script.train(script.Args(runs_dir=tmp_path / "runs", **flags))
    compiled = re.findall(r"Compiling jit\((\w+)\)", caplog.text)
    assert compiled.count(update) == 1
