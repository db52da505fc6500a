"""What holds across all scripts: one name, one text; flags with help; a README that keeps its word."""

import ast
import dataclasses
import difflib
import gc
import importlib
import itertools
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tyro
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path for path in ROOT.glob("*.py") if re.match("eaude|polyprune", path.name))
README = (ROOT / "README.md").read_text()

# Names that stand for different things in different scripts; all others have the same text wherever they appear.
OF_A_WORLD = {"canonical_name", "make_env", "Batch", "QNetwork", "population_q_values"}
OF_AN_ALGORITHM = {"AgentState", "Draws", "learn_critics", "learn"}
OF_BOTH = {"Args", "init_agent", "train"}

SECTIONS = ["Arguments", "Environment", "Replay", "Network", "Pruning", "Agent"]
SECTIONS += ["Learning", "Acting", "Training", "Run"]


def parse(source: str) -> ast.Module:
    """CPython 3.11 can raise a SystemError if garbage is collected in the middle of this (gh-106905)."""
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def definitions(source: str) -> dict[str, str]:
    """Text of each top-level function, class and constant, with its decorators and comments."""
    lines, texts = source.splitlines(), {}
    for node in parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            first = min([node.lineno, *[decorator.lineno for decorator in node.decorator_list]])
            texts[node.name] = "\n".join(lines[first - 1 : node.end_lineno])
        elif isinstance(node, ast.Assign):
            for name in [x.id for target in node.targets for x in ast.walk(target) if isinstance(x, ast.Name)]:
                texts[name] = "\n".join(lines[node.lineno - 1 : node.end_lineno])
    return texts


def differences(sources: dict[str, str]) -> dict[str, str]:
    """{name: unified diff} of the names that have more than one text."""
    found = {}
    for (file, source), (other_file, other_source) in itertools.combinations(sources.items(), 2):
        texts, other_texts = definitions(source), definitions(other_source)
        for name in texts.keys() & other_texts.keys():
            if texts[name] != other_texts[name]:
                pair = texts[name].splitlines(), other_texts[name].splitlines()
                found[name] = "\n".join(difflib.unified_diff(*pair, file, other_file, lineterm=""))
    return found


def flags(path: Path) -> dict[str, str]:
    """{flag: help} in the order of the script, from the comments beside the fields of `Args`."""
    fields = re.findall(r"^    (\w+): .*?  # (.*)$", definitions(path.read_text())["Args"], re.MULTILINE)
    return dict(fields)


def module(path: Path):
    return importlib.import_module(path.stem)


def test_one_name_one_text():
    kinds = [("*", OF_A_WORLD | OF_AN_ALGORITHM)]
    kinds += [(f"*_{world}", OF_AN_ALGORITHM) for world in ("atari", "minatar", "mujoco")]
    kinds += [(f"{algorithm}_*", OF_A_WORLD) for algorithm in ("eaudedqn", "polyprune_dqn")]
    for pattern, may_differ in kinds:
        sources = {path.name: path.read_text() for path in SCRIPTS if path.match(f"{pattern}.py")}
        assert len(sources) > 1
        found = [diff for name, diff in differences(sources).items() if name not in may_differ | OF_BOTH]
        assert not found, "\n\n".join(found)


@pytest.mark.parametrize(
    ("text", "other", "differing"),
    [
        ("def f(x):\n    return x", "def f(x):\n    return x", set()),
        ("def f(x):\n    return x", "def f(x):\n    return x + 1", {"f"}),
        ("def f(x):\n    return x", "def g(x):\n    return x + 1", set()),
        ("def f(x):\n    return x  # why", "def f(x):\n    return x", {"f"}),
        ("@jit\ndef f(x):\n    return x", "def f(x):\n    return x", {"f"}),
        ("class A:\n    x: int = 1", "class A:\n    x: int = 2", {"A"}),
        ("A, B = 1, 2", "A, B = 1, 3", {"A", "B"}),
        ("x = 1\n\n\ndef f():\n    pass", "def f():\n    pass\n\n\nx = 1", set()),
    ],
)
def test_the_comparison_sees_every_difference(text, other, differing):
    assert set(differences({"a.py": text, "b.py": other})) == differing


def test_shared_flags_keep_their_order():
    for path, other in itertools.combinations(SCRIPTS, 2):
        here, there = flags(path), flags(other)
        shared = [name for name in here if name in there]
        assert shared == [name for name in there if name in here]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_every_flag_has_help(path, capsys):
    fields = [field.name for field in dataclasses.fields(module(path).Args)]
    assert list(flags(path)) == fields
    with pytest.raises(SystemExit):
        tyro.cli(module(path).Args, args=["--help"])
    shown = re.sub(r"[\s│]+", "", capsys.readouterr().out)
    for name, text in flags(path).items():
        assert "--" + name.replace("_", "-") in shown
        assert re.sub(r"\s+", "", text) in shown


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_sections_come_in_the_same_order(path):
    assert re.findall(r"^# ---- (\w+).* -+$", path.read_text(), re.MULTILINE) == SECTIONS


def test_the_plumbing_is_the_same_in_all_scripts():
    assert len({path.read_text().split("\n# ---- Run: ")[1] for path in SCRIPTS}) == 1


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_nothing_runs_on_import(path):
    docstring, *body = parse(path.read_text()).body
    assert isinstance(docstring.value.value, str)
    guarded = [node for node in body if isinstance(node, ast.If)]  # Ctrl-C during the imports, and the call of main
    assert len(guarded) == 2
    assert guarded[1] is body[-1]
    for node in guarded:
        assert ast.unparse(node).startswith("if __name__ == '__main__':\n")
        assert len(node.body) == 1
    body = [node for node in body if node not in guarded]
    declarations = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AugAssign
    assert all(isinstance(node, declarations) for node in body)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_imports_are_declared_and_tested_versions_satisfy_the_lower_bounds(path):
    pins = [Requirement(line) for line in (ROOT / "requirements.txt").read_text().split()]
    tested = {pin.name: next(iter(pin.specifier)).version for pin in pins}
    block = re.search(r"^# /// script\n((?:# .*\n)+)# ///$", path.read_text(), re.MULTILINE)[1]
    declared = [Requirement(text) for text in tomllib.loads(re.sub("^# ", "", block, flags=re.M))["dependencies"]]
    for requirement in declared:
        assert requirement.specifier.contains(tested[requirement.name]), requirement
    imported = set()
    for node in ast.walk(parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(node.module.split(".")[0])
    third_party = imported - sys.stdlib_module_names
    assert third_party == {requirement.name.replace("-", "_") for requirement in declared}


def readme_commands():
    """(script, flags) of every command in the README."""
    return re.findall(r"(?:python|uv run) (\w+)\.py((?: .*?)?)(?:\s+#.*|`.*)?$", README, re.MULTILINE)


def test_readme_shows_every_script():
    assert {name for name, _ in readme_commands()} == {"play_policy", *(path.stem for path in SCRIPTS)}


@pytest.mark.parametrize(("name", "arguments"), readme_commands())
def test_readme_commands_parse(name, arguments):
    script = importlib.import_module(name)
    args = tyro.cli(script.Args, args=shlex.split(arguments))
    script.check_args(args)
    if name != "play_policy":
        assert args.env_id in arguments  # every command names its game, and it is the one that was read


def test_departures_from_the_paper_are_those_of_the_readme():
    marked = {text for path in SCRIPTS for text in re.findall(r"# DIFFERS: (.*)", path.read_text())}
    section = re.search(r"^## Departures from the paper\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)[1]
    assert set(re.findall(r"^\d+\. \*\*(.*?)\*\*", section, re.MULTILINE)) == marked


def test_the_readme_counts_the_lines_that_differ():
    counts = re.findall(r"`diff\s(\w+\.py)\s(\w+\.py)`\D+(\d+)", README)
    assert len(counts) == 6
    for name, other, count in counts:
        diff = subprocess.run(["diff", ROOT / name, ROOT / other], capture_output=True, text=True, check=False).stdout
        assert sum(line.startswith(("<", ">")) for line in diff.splitlines()) == int(count), (name, other)
