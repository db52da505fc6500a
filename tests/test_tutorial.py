"""The tutorial as a student runs it: the answers solve it, and what is in git is what its code prints and draws.

After a change to the notebook, to what it calls or to benchmark/results/minatar.csv, run its cells again, in place:

python tests/test_tutorial.py
"""

import base64
import io
import json
import re
import sys
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmark")]

import plot  # noqa: E402

import eaudedqn_minatar  # noqa: E402

NOTEBOOK = ROOT / "tutorial.ipynb"
EXERCISES = range(1, 7)
STEPS = "STEPS = 12_000"  # of each training run
# Cells whose text is the same on every machine: no training, no time, no dot product on the way.
# "study" is what benchmark/results/minatar.csv says.
DETERMINISTIC = {"calls", "field", "masks", "agent", "tournament", "combinatorics", "study", "grade", "plant"}
DETERMINISTIC |= {"exercise-5", *(f"check-{n}" for n in EXERCISES)}  # without the answers
PICTURES = "diagram", "field", "masks", "agent", "layers", "tournament", "combinatorics", "study"  # the same everywhere
TENSORS = "jax.tree.leaves(params) if x.ndim > 1"
OTHER_ANSWERS = [  # exercise, a piece of its answer, what else a student may write there, and what the check says then
    (1, "max(total_steps - step, 1)", "(total_steps - step)", "it raises ZeroDivisionError"),
    (1, "return sparsity", "if step == total_steps: return 1.0\n    return sparsity", "so the cap decides"),
    (1, "return sparsity", "if step == total_steps: return sparsity\n    return sparsity", "so the cap decides"),
    (1, "(1 - sparsity) * min(", "min((1 - sparsity) * ", "the cap is a share of the weights that remain"),
    (1, " * noise", "", "noise scales the stretch"),
    (1, "total_steps - step", "total_steps", "so the line is steeper"),
    (2, "tournament_size, replace=False", "3, replace=False", "does a tournament have `tournament_size` networks?"),
    (2, ", replace=False", "", "are the draws distinct"),
    (2, "drawn[losses[drawn].argmin()]", "losses[drawn].argmin()", "not its place in the draw"),
    (2, "return parents", "return np.sort(selected)", "slot"),
    (3, 'pruned": False', 'pruned": True', '"weights are pruned": the largest sparsity was 0'),
    (3, 'same network": True', 'same network": False', "the targets were in slots [0 1"),
    (3, 'by copies": True', 'by copies": False', "slots got another network"),
    (3, 'different networks": False', 'different networks": True', "after updates there were ["),
    (3, 'new Adam": True', 'new Adam": False', "their Adams have made 0 and 1 steps"),
    (4, "network_at(state.opt_state, parents)", "jax.tree.map(np.array, state.opt_state)", "has that of network 0"),
    (4, "(opt_state=opt_state)", "(opt_state=network_at(state.opt_state, parents))", "whose memory was reused"),
    (4, "(opt_state=opt_state)", "()", "network 1's Adam, but has a new one"),
    (4, "parents, step)._", "parents[::-1], step)._", "weights should be those of prune_copies"),
    (
        4,
        "return prune_copies(args, rng, state, parents, step)._replace(opt_state=opt_state)",
        "new = prune_copies(args, rng, state, parents, step)\n"
        "    return new._replace(opt_state=network_at(new.opt_state, parents))",
        "Solved.",
    ),
    (5, " if x.ndim > 1", "", "without biases"),
    (5, "weights == 0", "weights != 0", "count zeros, not what is left"),
    (5, "np.mean(weights == 0)", f"np.mean([np.mean(x == 0) for x in {TENSORS}])", "not a mean of tensors"),
    (5, '"learn"', '"prune_copies"', "prune_copies is not it"),
    (6, "[0.5, 0.3, 0.6, 0.6, 0.6]", "[50, 30, 60, 60, 60]", "a sparsity is from 0 to less than 1"),
    (6, "[0.5, 0.3, 0.6, 0.6, 0.6]", "[0.3, 0.3, 0.6, 0.6, 0.6]", "in none is it less sparse than the first target"),
    (6, "[2, 1, 3, 4, 5]", "[1, 2, 3, 4, 5]", "the same network is the target twice"),
    (6, "[2, 1, 3, 4, 5]", "[2, 3, 4, 5, 1]", "Solved."),  # slot 4 has a copy
]


def printed(cell) -> str:
    return "".join(x.text for x in cell.outputs if x.output_type == "stream" and x.name == "stdout")


def verdict(cell) -> str:
    return printed(cell).splitlines()[-1]


def without_numbers(text: str) -> list[str]:
    return re.sub(r"-?\d[\d.,]*", "0", text).split()


def pictures(cell) -> list[np.ndarray]:
    data = [base64.b64decode(x.data["image/png"]) for x in cell.outputs if x.output_type == "display_data"]
    return [np.asarray(Image.open(io.BytesIO(x)).convert("RGB")).astype(int) for x in data]


def cells(notebook) -> dict:
    return {cell.id: cell for cell in notebook.cells}


@pytest.fixture(scope="module")
def in_git():
    return nbformat.read(NOTEBOOK, as_version=4)


def execute(notebook) -> None:
    resources, options = {"metadata": {"path": str(ROOT)}}, dict(coalesce_streams=True, record_timing=False)
    nbclient.NotebookClient(notebook, timeout=1_200, resources=resources, **options).execute()


def refresh() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    execute(notebook)
    notebook.metadata.language_info = {"name": "python"}  # without this machine's version
    nbformat.write(notebook, NOTEBOOK)


def answer(cell) -> str:
    return re.search(r"```python\n(.*?)```", cell.source, re.DOTALL)[1]


@pytest.fixture(scope="module")
def run(in_git) -> dict:
    """All of the notebook with shorter runs; after each check other answers, each with the check once more, `other-0`,
    ..., and at last the right one: `solved-1`, ..."""
    notebook = nbformat.from_dict(in_git)
    ran = cells(notebook)
    for n in EXERCISES:
        check, right = ran[f"check-{n}"], answer(ran[f"answer-{n}"])
        tried = {f"solved-{n}": right}
        for i, (exercise, piece, other, _) in enumerate(OTHER_ANSWERS):
            if exercise == n:
                assert right.count(piece) == 1, piece
                tried = {f"other-{i}": right.replace(piece, other), **tried}
        place = notebook.cells.index(check) + 1
        new = [nbformat.v4.new_code_cell(f"{source}\n\n{check.source}", id=name) for name, source in tried.items()]
        notebook.cells[place:place] = new
    assert STEPS in ran["setup"].source
    ran["setup"].source = ran["setup"].source.replace(STEPS, "STEPS = 1_600")
    execute(notebook)
    return cells(notebook)


@pytest.mark.slow
def test_answers_solve_the_exercises_and_what_is_in_git_is_what_the_code_prints_and_draws(in_git, run):
    """One test, so that the notebook runs once."""
    for n in EXERCISES:
        assert verdict(run[f"solved-{n}"]) == "Solved.", n
    for i, (n, _, other, hint) in enumerate(OTHER_ANSWERS):
        said = verdict(run[f"other-{i}"])
        assert said.startswith("Solved." if hint == "Solved." else "Not solved yet: "), (n, other, said)
        assert hint in said, (n, other, said)
    for name, given in cells(in_git).items():
        if given.cell_type == "code":
            same = str if name in DETERMINISTIC else without_numbers
            assert same(printed(run[name])) == same(printed(given)), name
            assert len(pictures(run[name])) == len(pictures(given)), name
    for name in PICTURES:
        for now, given in zip(pictures(run[name]), pictures(cells(in_git)[name])):
            assert now.shape == given.shape, name
            assert (abs(now - given).max(axis=2) > 32).mean() < 5e-4, name  # a few pixels may differ with the machine


def test_each_check_is_tried_with_a_wrong_answer():
    assert {n for n, *_, hint in OTHER_ANSWERS if hint != "Solved."} == set(EXERCISES)


@pytest.mark.parametrize("n_seeds", [1, 2, 5])
def test_the_study_may_have_any_number_of_seeds(in_git, n_seeds, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    monkeypatch.setattr(plot, "chance_sparsity", lambda *_, **__: (np.array([0, 100]), np.array([0, 0.9])))
    rows = [",".join(plot.COLUMNS)]
    for variant, seed in [(x, seed) for x in ("dense", "eaude", "polyprune") for seed in range(1, n_seeds + 1)]:
        curves = {plot.RETURNS[1]: 10 * seed, "sparsity/target": 0.25 * (variant != "dense")}
        rows += [
            f"minatar,{variant},Breakout,{seed},{tag},{step},{curves[tag]}" for tag in curves for step in (50, 100)
        ]
    (tmp_path / "minatar.csv").write_text("\n".join(rows))
    lines = {variant: style for variant, style in plot.named("DQN").items() if variant != "oracle"}
    names = dict(plot=plot, args=eaudedqn_minatar.Args(), lines=lines, tags=(plot.RETURNS[1], "sparsity/target"))
    exec(cells(in_git)["study"].source, names)
    shown = {
        1: "dense DQN             1 seed, sparsity 0.00, return in the last tenth 10.0\n",
        2: "dense DQN            2 seeds, sparsity 0.00, return in the last tenth 15.0 (10.0 to 20.0)\n",
        5: "dense DQN            5 seeds, sparsity 0.00, return in the last tenth 30.0 (10.0 to 50.0)\n",
    }
    output = capsys.readouterr().out
    assert shown[n_seeds] in output
    assert "EauDeDQN has 75% of dense DQN's weights and 100% of its return.\n" in output


def test_no_text_counts_the_seeds(in_git):
    text = " ".join(cell.source for cell in in_git.cells if cell.cell_type == "markdown")
    counts = re.findall(r"(?i)\b(?:\d+|one|two|three|four|five) seeds?\b", text)
    assert counts == ["1 seed"]  # "where the table says 1 seed"


@pytest.mark.parametrize("n", EXERCISES)
def test_the_exercises_in_git_are_unsolved_and_say_so_kindly(in_git, n):
    assert printed(cells(in_git)[f"check-{n}"]).startswith("Not solved yet: ")


def test_an_answer_stands_below_the_check(in_git):
    names = [cell.id for cell in in_git.cells]
    for n in EXERCISES:
        start = names.index(f"text-{n}")
        parts = [name for name in names[start : names.index(f"answer-{n}") + 1] if name.endswith(f"-{n}")]
        assert parts == [f"text-{n}", f"exercise-{n}", f"check-{n}", f"answer-{n}"]


def test_all_outputs_are_in_git_and_small(in_git):
    code = [cell for cell in in_git.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} == {"stream", "display_data"}  # no error, no bare value
    assert all(output.get("name", "stdout") == "stdout" for output in outputs)
    assert NOTEBOOK.stat().st_size < 1_500_000


def test_running_it_again_changes_outputs_alone(in_git):
    assert NOTEBOOK.read_text() == nbformat.writes(in_git) + "\n"
    assert not any("execution" in cell.metadata for cell in in_git.cells)  # times
    assert json.loads(NOTEBOOK.read_text())["metadata"].keys() == {"kernelspec", "language_info"}


if __name__ == "__main__":
    refresh()
