"""The tutorial as a student runs it: with the answers put in it is solved, and what is in git is what its code prints."""

import json
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOK = ROOT / "tutorial.ipynb"
EXERCISES = range(1, 7)
# Cells whose text is the same on every machine: no training, no time, no dot product on the way.
DETERMINISTIC = "calls", "field", "agent", "tournament", "combinatorics", "grade", "plant"


def printed(cell) -> str:
    return "".join(x.text for x in cell.outputs if x.output_type == "stream" and x.name == "stdout")


def cells(notebook) -> dict:
    return {cell.id: cell for cell in notebook.cells}


@pytest.fixture(scope="module")
def in_git():
    return nbformat.read(NOTEBOOK, as_version=4)


@pytest.fixture(scope="module")
def solved(in_git):
    """All of it, with the answers in place of the stubs, and shorter runs."""
    notebook = nbformat.from_dict(in_git)
    by_id = cells(notebook)
    for n in EXERCISES:
        by_id[f"exercise-{n}"].source = re.search(r"```python\n(.*?)```", by_id[f"answer-{n}"].source, re.DOTALL)[1]
    assert "STEPS = 20_000" in by_id["setup"].source
    by_id["setup"].source = by_id["setup"].source.replace("STEPS = 20_000", "STEPS = 1_600")
    nbclient.NotebookClient(notebook, timeout=1_200, resources={"metadata": {"path": str(ROOT)}}).execute()
    return cells(notebook)


@pytest.mark.slow
@pytest.mark.parametrize("n", EXERCISES)
def test_the_answers_solve_the_exercises(solved, n):
    assert printed(solved[f"check-{n}"]).splitlines()[-1] == "Solved."


@pytest.mark.slow
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_the_text_in_git_is_what_the_code_prints(in_git, solved, name):
    assert printed(solved[name]) == printed(cells(in_git)[name])


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
