"""The emulator's protocol, in `play_policy.py` and in each Atari script, against raw ALE, one frame at a time."""

import ale_py
import numpy as np
import pytest
from ale_py import roms

import eaudecql_atari
import eaudedqn_atari
import play_policy
import polyprune_cql_atari
import polyprune_dqn_atari

SCRIPTS = (eaudedqn_atari, eaudecql_atari, polyprune_dqn_atari, polyprune_cql_atari)
MAKERS = {script.__name__: lambda env_id, horizon, s=script: s.make_env(env_id, 1, horizon) for script in SCRIPTS}
MAKERS["play_policy"] = play_policy.make_atari_env
every_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def raw_game(name, sticky=0.0, seed=0):
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    ale = ale_py.ALEInterface()
    ale.setInt("random_seed", seed)
    ale.setFloat("repeat_action_probability", sticky)
    ale.loadROM(roms.get_rom_path(name))
    ale.reset_game()
    return ale


def coverage(n):
    """(84, n): the share of each new pixel that an old one covers."""
    edges = np.linspace(0, n, 85)
    ends, starts = np.minimum.outer(edges[1:], np.arange(1, n + 1)), np.maximum.outer(edges[:-1], np.arange(n))
    return np.clip(ends - starts, 0, 1) * 84 / n


ROWS, COLUMNS = coverage(210), coverage(160)


def seen(screens):
    """What an agent sees of four frames: the maximum of the last two, shrunk by area."""
    return ROWS @ np.maximum(screens[-2], screens[-1]) @ COLUMNS.T


def is_seen(screens, observations):
    return np.abs(seen(screens) - observations[0, -1]).max() < 1  # rounded


@every_maker
def test_a_quarter_of_frames_repeats_the_action_before(make):
    """The paddle of Breakout, before the ball is served, shows from which of four frames on a new action counts.

    Raw ALE, where nothing sticks, tries 0 to 4 frames of the old action; one of them gives the pixels that were seen.
    """
    env, ale = make("Breakout", 27_000), raw_game("breakout")
    env.reset(seed=3)
    actions, old, n_stuck, n_drawn = ale.getMinimalActionSet(), 0, 0, 0
    left, right = (list(actions).index(x) for x in (ale_py.Action.LEFT, ale_py.Action.RIGHT))
    for _ in range(2_000):
        new = right if old == left else left
        observations = env.step(np.array([new]))[0]
        before, matches = ale.cloneState(), []
        for n_waits in range(5):
            ale.restoreState(before)
            screens = []
            for i in range(4):
                ale.act(actions[old if i < n_waits else new])
                screens.append(ale.getScreenGrayscale())
            if is_seen(screens, observations):
                matches.append((n_waits, ale.cloneState()))
        assert matches
        if len(matches) > 1:
            print("ambiguous", [m[0] for m in matches])
        n_waits, after = matches[0]
        ale.restoreState(after)
        n_stuck, n_drawn = n_stuck + n_waits, n_drawn + min(n_waits + 1, 4)
        old = new if n_waits < 4 else old
    print(n_stuck / n_drawn, n_drawn)
