"""The tutorial as a student runs it: the answers solve it, and what is in git is what its code prints and draws.

After a change to the notebook, to what it calls or to benchmark/results/minatar.csv, run its cells again, in place:

python tests/test_tutorial.py
"""

import base64
import io
import json
import re
from pathlib import Path

import nbclient
import nbformat
import numpy as np
import pytest
from PIL import Image

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "tutorial.ipynb"
EXERCISES = range(1, 7)
STEPS = "STEPS = 12_000"  # of each training run
# Cells whose text is the same on every machine: no training, no time, no dot product on the way.
# "study" is what benchmark/results/minatar.csv says.
DETERMINISTIC = {"calls", "field", "agent", "tournament", "combinatorics", "study", "grade", "plant", "exercise-5"}
DETERMINISTIC |= {f"check-{n}" for n in EXERCISES}  # without the answers
PICTURES = "diagram", "field", "agent", "layers", "tournament", "combinatorics", "study"  # the same on every machine


def printed(cell) -> str:
    return "".join(x.text for x in cell.outputs if x.output_type == "stream" and x.name == "stdout")


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
    """All of the notebook with shorter runs; after each check the answer, and the check once more: `solved-1`, ..."""
    notebook = nbformat.from_dict(in_git)
    ran = cells(notebook)
    for n in EXERCISES:
        place = notebook.cells.index(ran[f"check-{n}"]) + 1
        for source, name in ((ran[f"check-{n}"].source, "solved"), (answer(ran[f"answer-{n}"]), "tried")):
            notebook.cells.insert(place, nbformat.v4.new_code_cell(source, id=f"{name}-{n}"))
    assert STEPS in ran["setup"].source
    ran["setup"].source = ran["setup"].source.replace(STEPS, "STEPS = 1_600")
    execute(notebook)
    return cells(notebook)


@pytest.mark.slow
def test_answers_solve_the_exercises_and_what_is_in_git_is_what_the_code_prints_and_draws(in_git, run):
    """One test, so that the notebook runs once."""
    for n in EXERCISES:
        assert printed(run[f"solved-{n}"]).splitlines()[-1] == "Solved.", (n, printed(run[f"solved-{n}"]))
    for name, given in cells(in_git).items():
        if given.cell_type == "code":
            same = str if name in DETERMINISTIC else without_numbers
            assert same(printed(run[name])) == same(printed(given)), name
            assert len(pictures(run[name])) == len(pictures(given)), name
    for name in PICTURES:
        for now, given in zip(pictures(run[name]), pictures(cells(in_git)[name])):
            assert now.shape == given.shape, name
            assert (abs(now - given).max(axis=2) > 32).mean() < 5e-4, name  # a few pixels may differ with the machine


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
