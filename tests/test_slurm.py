"""Sweeps on a real Slurm of one node: whatever happens to its jobs, the runs end as on this machine alone."""

import re
import subprocess

import pytest
from slurm_node import LIMIT, SlurmNode, missing
from test_sweep import STUDY, command, results, run_sweep, write_study

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())]
LONGER = STUDY.replace("--total-timesteps 2000", "--total-timesteps 5000")
FLAGS = ["--slurm=--partition=low --ntasks=1 --time=10", "--jobs", "2"]


@pytest.fixture(scope="module")
def node(tmp_path_factory):
    try:
        node = SlurmNode(tmp_path_factory.mktemp("slurm"))
        node.wait_until(node.is_idle)  # where it cannot start, a daemon ends at once
    except AssertionError as error:
        pytest.skip(f"Slurm does not start here: {error}")
    yield node
    node.close()


def tasks(node, state="RUNNING"):
    """{name of a run: its job}"""
    return re.findall(rf"^(\S+) {state}$", node.run("squeue", "-h", "-r", "-p", "low", "-o", "%F_%K %T"), re.MULTILINE)


def submit(folder):
    result = run_sweep(folder, *FLAGS)
    assert (result.returncode, result.stderr) == (0, "")
    return result.stdout


def n_checkpoints(folder):
    return len(list(folder.glob("tiny/*/*/checkpoint.npz")))


def n_starts(folder):
    """How often a script has begun its work, each time with a new file of curves. Two can begin between two looks."""
    return len(list(folder.glob("tiny/*/*/events*")))


def test_runs_end_as_they_do_here_whatever_happens_to_their_jobs(node, tmp_path):
    alone, folder = write_study(tmp_path / "alone", LONGER), write_study(tmp_path / "cluster", LONGER)
    local = subprocess.Popen(command(alone, "--jobs", "2"), stdout=subprocess.DEVNULL)
    assert local.wait(timeout=LIMIT) == 0

    assert "Submitted batch job" in submit(folder)
    again = submit(folder)  # all are in the queue, but for the oracle's, which have to wait
    assert "Submitted" not in again
    assert "2 missing, 4 queued" in again
    node.wait_until(lambda: n_checkpoints(folder) == 2)
    node.run("sbatch", "-p", "high", "-n", "2", "--output=/dev/null", "--wrap", "true")  # takes both cores
    node.wait_until(lambda: len(tasks(node)) == 0)
    node.wait_until(lambda: n_starts(folder) >= 4)  # they are back
    warned, *_ = tasks(node)
    node.run("scancel", "--batch", "--signal=TERM", warned)  # as before a time limit: it ends by itself, and comes back
    node.wait_until(lambda: warned not in tasks(node))
    node.wait_until(lambda: n_starts(folder) >= 5)
    requeued = tasks(node)[-1]
    node.run("scontrol", "requeue", requeued)
    node.wait_until(lambda: requeued not in tasks(node))
    node.wait_until(lambda: n_starts(folder) >= 6)
    cancelled = tasks(node)[0]
    node.run("scancel", cancelled)
    node.wait_until(lambda: not node.run("squeue", "-h"))
    assert len(results(folder)) == 4
    state = run_sweep(folder, "--dry-run").stdout
    assert state.count("interrupted: ") == 1  # it stays cancelled
    assert state.count("done: ") == 3

    assert "Submitted batch job" in submit(folder)
    node.wait_until(lambda: not node.run("squeue", "-h"))
    submit(folder)  # the oracle's, if they had to wait for the cancelled one
    node.wait_until(lambda: not node.run("squeue", "-h"))
    assert submit(folder).endswith("6 done\n")
    expected, found = results(alone), results(folder)
    assert found.keys() == expected.keys()
    assert len(expected) == 6
    for name, weights in expected.items():
        assert all((found[name][tensor] == x).all() for tensor, x in weights.items()), name
