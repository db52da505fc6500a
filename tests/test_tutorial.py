"""The tutorial as a student runs it: the answers solve it, and what is in git is what its code prints."""

import json
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "tutorial.ipynb"
EXERCISES = range(1, 7)
STEPS = "STEPS = 12_000"  # of each training run
# Cells whose text is the same on every machine: no training, no time, no dot product on the way.
DETERMINISTIC = "calls", "field", "agent", "tournament", "combinatorics", "grade", "plant"


def printed(cell) -> str:
    return "".join(x.text for x in cell.outputs if x.output_type == "stream" and x.name == "stdout")


def cells(notebook) -> dict:
    return {cell.id: cell for cell in notebook.cells}


@pytest.fixture(scope="module")
def in_git():
    return nbformat.read(NOTEBOOK, as_version=4)


def answer(cell) -> str:
    return re.search(r"```python\n(.*?)```", cell.source, re.DOTALL)[1]


@pytest.mark.slow
def test_answers_solve_the_exercises_and_the_text_in_git_is_what_the_code_prints(in_git):
    """One test, as it runs all of the notebook, with the answers in place of the stubs and with shorter runs."""
    notebook = nbformat.from_dict(in_git)
    solved, given = cells(notebook), cells(in_git)
    for n in EXERCISES:
        solved[f"exercise-{n}"].source = answer(solved[f"answer-{n}"])
    assert STEPS in solved["setup"].source
    solved["setup"].source = solved["setup"].source.replace(STEPS, "STEPS = 1_600")
    resources = {"metadata": {"path": str(ROOT)}}
    nbclient.NotebookClient(notebook, timeout=1_200, coalesce_streams=True, resources=resources).execute()
    for n in EXERCISES:
        assert printed(solved[f"check-{n}"]).splitlines()[-1] == "Solved.", (n, printed(solved[f"check-{n}"]))
    for name in DETERMINISTIC:
        assert printed(solved[name]) == printed(given[name]), name


@pytest.mark.parametrize("n", EXERCISES)
def test_the_exercises_in_git_are_unsolved_and_say_so_kindly(in_git, n):
    assert printed(cells(in_git)[f"check-{n}"]).startswith("Not solved yet: ")


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
