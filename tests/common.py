"""What the tests of several scripts share."""

import subprocess
import sys
import threading

import jax
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from eaudedqn_atari import Batch

LIMIT = 600  # seconds: it ends a hang, and is far above what a busy machine needs
TINY = (2, 3, 3, 4)  # features of a network that is quick to compile and to run


def random_batch(rng, size=6, n_actions=3):
    frames = rng.integers(0, 256, (size, 5, 84, 84), dtype=np.uint8)
    rewards = rng.choice([-1, 0, 1], size).astype(np.float32)
    return Batch(frames, rng.integers(0, n_actions, size).astype(np.int32), rewards, np.arange(size) % 3 == 1)


def scalars(folder):
    """{tag: [(step, value), ...]} of a run's TensorBoard events. What was not cut back is there twice."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}, purge_orphaned_data=False).Reload()
    tags = events.Tags()["scalars"]  # files of one second come in the order of their names, the tenth before the ninth
    return {tag: sorted((event.step, event.value) for event in events.Scalars(tag)) for tag in tags}


def assert_trees_equal(left, right):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(left), jax.device_get(right))


def at(tree, idx):
    """What is at `idx` in all tensors: one network of a population."""
    return jax.tree.map(lambda x: x[idx], tree)


def final_weights(run):
    """By name, of the policy that a run has left."""
    with np.load(run / "policy.npz") as arrays:
        return {name: x for name, x in arrays.items() if name != "about"}


def record_calls(script, monkeypatch, names):
    """Run the real functions, and keep (name, step, state before, state after) of each call."""
    calls, memories = [], []

    def recorder(name, function):
        def call(*inputs):
            state = next(x for x in inputs if isinstance(x, script.AgentState))
            before = jax.device_get(state)
            result = function(*inputs)
            calls.append((name, memories[-1].n_added, before, jax.device_get(result[0] if name == "learn" else result)))
            return result

        return call

    for name in names:
        monkeypatch.setattr(script, name, recorder(name, getattr(script, name)))
    name = "ReplayMemory" if hasattr(script, "ReplayMemory") else "TransitionMemory"

    class Recorded(getattr(script, name)):
        def __init__(self, *inputs, **saved):
            super().__init__(*inputs, **saved)
            memories.append(self)

    monkeypatch.setattr(script, name, Recorded)
    return calls


def run_script(script, flags, folder):
    """Start a script as a person does, from the command line."""
    command = [sys.executable, script.__file__, *flags.split(), "--runs-dir", folder]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT)


def stop_script(script, flags, folder, signum):
    """Exit code, output and errors of a script that gets a signal as soon as its run has begun."""
    command = [sys.executable, script.__file__, *flags.split(), "--runs-dir", folder]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        hang = threading.Timer(LIMIT, process.kill)
        hang.start()
        begin = next((line for line in process.stdout if line.startswith("Run folder")), "")
        process.send_signal(signum)
        output, errors = process.communicate()
        hang.cancel()
    return process.returncode, begin + output, errors
