"""The raw curves of a study as a CSV file, and the figures and tables that are made from these files alone.

python benchmark/plot.py runs/small_mujoco     # writes benchmark/results/small_mujoco.csv
python benchmark/plot.py                       # draws all figures, prints all tables
python benchmark/plot.py --only small_regimes  # one of them, named as the study
"""

import csv
import dataclasses
import itertools
import json
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import matplotlib
import numpy as np
import scipy.stats
import tyro
from PIL import Image

matplotlib.use("Agg")  # no screen is needed
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results"
RETURNS = "eval/episodic_return", "charts/episodic_return"  # the second where a script does not evaluate
AXES = {"sparsity/target": "sparsity", "losses/cumulated": "loss of a target period"}  # what stands beside a curve
AXES |= {RETURNS[0]: "return", RETURNS[1]: "return in training"}
N_POINTS = 50  # of a curve in a CSV file, unless it is one of evaluations
N_RESAMPLES = 2_000  # of a bootstrap interval
FROZEN, N_FROZEN = "frozen/episodic_return", 30  # episodes of the policy that a run of MinAtar has left
SEEN_TOURNAMENTS = [(variant, "Breakout", "1") for variant in ("eaude", "eaude_global", "eaude_uniform")]
TOURNAMENTS = "tournament/pruned", "tournament/loss"  # a value for each copy, at the step at which it was compared
COLUMNS = "study", "variant", "env", "seed", "tag", "step", "value"
# One colour for each algorithm in all figures: those of Okabe and Ito, which colour-blind people can tell apart. Line
# and marker are its own, too. Variants of an algorithm are lighter or darker, or have another line.
DENSE, EAUDE = ("#000000", ":", "o"), ("#D55E00", "-", "D")
POLYPRUNE, ORACLE = ("#0072B2", "--", "s"), ("#009E73", "-.", "^")
OTHERS = "#CC79A7", "-", "v"  # other people's agents
LIGHT_EAUDE, DARK_EAUDE = "#F2A66B", "#7F3800"
LIGHT_POLYPRUNE, DARK_POLYPRUNE = "#7FB8DC", "#00395A"
CROWN = [(-1, -0.7), (1, -0.7), (1.2, 0.9), (0.5, 0), (0, 1.1), (-0.5, 0), (-1.2, 0.9), (-1, -0.7)]  # of a target
ALGORITHMS = {
    "dense": (DENSE, "dense {}"),
    "eaude": (EAUDE, "EauDe{}"),
    "polyprune": (POLYPRUNE, "PolyPrune{}, 0.95"),
    "oracle": (ORACLE, "PolyPrune{}, oracle"),
}
# Random and human scores of the authors' ten games and of KungFuMaster: Wang et al., "Dueling Network Architectures for
# Deep Reinforcement Learning", 2016, no-op starts. Later tables have 0 for random play of VideoPinball.
SCORES = {
    "Assault": (222.4, 742.0),
    "BeamRider": (363.9, 16926.5),
    "Boxing": (0.1, 12.1),
    "CrazyClimber": (10780.5, 35829.4),
    "Enduro": (0.0, 860.5),
    "KungFuMaster": (258.5, 22736.3),
    "MsPacman": (307.3, 6951.6),
    "Pong": (-20.7, 14.6),
    "Qbert": (163.9, 13455.0),
    "SpaceInvaders": (148.0, 1668.7),
    "VideoPinball": (16256.9, 17667.9),
}
Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # {tag: (steps, values)} of one run
Study = dict[tuple[str, str], list[Curves]]  # {(variant, env): a run for each seed}
Lines = dict[str, tuple[tuple[str, ...], str]]  # {variant: (style, label)}


@dataclasses.dataclass(frozen=True)
class Args:
    folder: tyro.conf.Positional[Path | None] = None  # of a study's runs, of which the CSV file is written
    only: str | None = None  # name of the figure to draw, in place of all


def fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


# ---- From runs to CSV files ------------------------------------------------------------------------------------------
def read_events(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, curves = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload(), {}
    for tag in events.Tags()["scalars"]:
        points = [(event.step, event.value) for event in events.Scalars(tag)]
        curves[tag] = np.array([step for step, _ in points]), np.array([value for _, value in points])
    return curves


def thin(steps: np.ndarray, values: np.ndarray, total: int, mean: bool) -> tuple[np.ndarray, np.ndarray]:
    """A point at the end of each of N_POINTS equal parts of the run: the mean over the part, or its last value."""
    if len(steps) <= N_POINTS:
        return steps, values
    parts = np.ceil(steps * N_POINTS / total).astype(int)
    ends = [np.flatnonzero(parts == part) for part in np.unique(parts)]
    return np.unique(parts) * total // N_POINTS, np.array([values[i].mean() if mean else values[i[-1]] for i in ends])


def population(run: Curves) -> tuple[np.ndarray, ...]:
    """Steps of the target updates, and there sparsities, cumulated losses and parents: (updates, networks)."""
    n_networks = sum(tag.startswith("sparsity/network_") for tag in run)
    names = "sparsity/network", "losses/cumulated", "population/parent"
    values = [np.array([run[f"{name}_{k}"][1] for k in range(n_networks)]).T for name in names]
    return run["sparsity/network_0"][0], *values


def tournaments(run: Curves) -> Curves:
    """Of each copy the share of its parent's weights that it lost, and at the next target update its cumulated loss
    relative to that of its parent, which stays in its own slot: -0.01 is lower by 1 %."""
    steps, sparsities, losses, parents = population(run)
    copies, parents = [], parents.astype(int)
    for i, k in np.argwhere(parents[:-1] != np.arange(parents.shape[1])):
        parent = parents[i, k]
        pruned = (sparsities[i + 1, k] - sparsities[i, parent]) / (1 - sparsities[i, parent])
        copies.append((steps[i + 1], pruned, losses[i + 1, k] / losses[i + 1, parent] - 1))
    compared, *values = np.reshape(copies, (-1, 3)).T
    return {tag: (compared.astype(int), x) for tag, x in zip(TOURNAMENTS, values)}


def needed(curves: Curves, study: str, run: tuple[str, ...]) -> Curves:
    """The curves of a run that figures are made of."""
    if study == "population":
        names = r"(sparsity/network|losses/cumulated|population/parent)_\d+"
        return {tag: points for tag, points in curves.items() if re.fullmatch(names, tag)}
    losses = [points for tag, points in curves.items() if re.fullmatch(r"losses/cumulated_\d+", tag)]
    if losses:  # of a population that of the network that becomes the target, the lowest
        curves["losses/cumulated"] = losses[0][0], np.min([values for _, values in losses], axis=0)
    tags = [next(tag for tag in RETURNS if tag in curves), "sparsity/target", "losses/cumulated"]
    if study.startswith("minatar"):
        tags.remove("losses/cumulated")
    if run in SEEN_TOURNAMENTS:
        curves |= tournaments(curves)
        tags += TOURNAMENTS
    return {tag: curves[tag] for tag in tags if tag in curves}


def rows_of(path: Path, study: str, run: tuple[str, ...]) -> list[tuple]:
    """Of the CSV file, for the run in the folder `path`."""
    rows, total = [], json.loads((path / "args.json").read_text())["total_timesteps"]
    for tag, points in needed(read_events(path), study, run).items():
        if tag not in (RETURNS[0], *TOURNAMENTS):
            points = thin(*points, total, mean=not tag.startswith("sparsity"))
        rows += [(study, *run, tag, step, f"{value:.5g}") for step, value in zip(*points)]
    return rows


def frozen_returns(policy: Path) -> list[str]:
    """In training EauDe plays a mixture of networks; this is what the file is worth."""
    command = [sys.executable, ROOT / "play_policy.py", policy, "--episodes", str(N_FROZEN)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.search("^Each: (.*)$", printed, re.MULTILINE)[1].split()


def collect(folder: Path) -> str:
    """The finished runs of a sweep go into the file of the study. Runs in it that are not in the folder stay."""
    from sweep import is_done

    study = folder.resolve().name
    file, found, others = RESULTS / f"{study}.csv", {}, defaultdict(list)  # {(variant, env, seed): rows}
    for path in folder.glob("*/*/policy.npz"):
        env, script, variant, seed = path.parent.parent.name.split("__")
        if is_done(path.parent.parent):
            found[variant, env, seed] = rows_of(path.parent, study, (variant, env, seed))
            played = frozen_returns(path) if script.endswith("_minatar") else []
            found[variant, env, seed] += [(study, variant, env, seed, FROZEN, *x) for x in enumerate(played, 1)]
    if not found:
        fail(f"there is no finished run of a sweep in {folder}")
    for row in list(csv.reader(file.read_text().splitlines()))[1:] if file.exists() else []:
        if tuple(row[1:4]) not in found:
            others[tuple(row[1:4])].append(row)
    file.parent.mkdir(exist_ok=True)
    runs = {**others, **found}
    with open(file, "w", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([COLUMNS, *[row for run in sorted(runs) for row in runs[run]]])
    return f"{file}: {len(found)} runs of {folder}, {len(others)} others that were there"


def load_study(*names: str, seeds: Sequence[int] = range(1_000)) -> Study:
    """Of one or more CSV files, as if they were one. All but the first may be missing."""
    points, runs = defaultdict(list), defaultdict(dict)
    for name in [x for x in names if x == names[0] or (RESULTS / f"{x}.csv").exists()]:
        with open(RESULTS / f"{name}.csv", newline="") as file:
            for row in csv.DictReader(file):
                key = row["variant"], row["env"], int(row["seed"]), row["tag"]
                points[key].append((int(row["step"]), float(row["value"])))
    for (variant, env, seed, tag), values in points.items():
        runs[variant, env, seed][tag] = tuple(np.array(values).T)
    study = defaultdict(list)
    for variant, env, seed in sorted(runs):
        if seed in seeds:
            study[variant, env].append(runs[variant, env, seed])
    return dict(study)


# ---- Statistics ------------------------------------------------------------------------------------------------------
def iqm(scores: np.ndarray, axis: int | None = None) -> np.ndarray:
    """Inter-quartile mean: of what is left without the lowest and the highest quarter (Agarwal et al., 2021)."""
    return scipy.stats.trim_mean(scores, 0.25, axis)


def bootstrap_interval(scores: Sequence[np.ndarray], statistic: Callable = iqm) -> tuple[float, float]:
    """95 % of the statistic if seeds are drawn anew with replacement, within each task. `scores` has a row for each."""
    rng = np.random.default_rng(0)
    draws = np.concatenate([rng.choice(task, (N_RESAMPLES, len(task))) for task in scores], axis=1)
    return tuple(np.percentile(statistic(draws, axis=1), (2.5, 97.5)))


def final_return(run: Curves) -> float:
    """The mean of the last three evaluations; online on Atari that of the episodes of the last tenth of the run."""
    if RETURNS[0] in run:
        return run[RETURNS[0]][1][-3:].mean()
    steps, returns = run[RETURNS[1]]
    return returns[steps > 0.9 * steps[-1]].mean()


def final_sparsity(run: Curves) -> float:
    return run["sparsity/target"][1][-1]


def final(runs: list[Curves]) -> tuple[np.ndarray, np.ndarray]:
    """Sparsities and returns at the end, of all seeds."""
    return np.array([final_sparsity(run) for run in runs]), np.array([final_return(run) for run in runs])


def complete(study: Study) -> Study:
    """Without the tasks that a variant has not finished with any seed."""
    variants = {variant for variant, _ in study}
    result = {key: runs for key, runs in study.items() if all((variant, key[1]) in study for variant in variants)}
    if not result:
        raise KeyError("every variant in one task")
    return result


def normalise(study: Study, scores: dict[str, tuple[float, float]] | None = None) -> Study:
    """Returns are 1 for the dense network at the end; with `scores` of Atari 0 for random play and 1 for a human. Those
    of frozen policies are 1 for the dense ones."""
    result = {}
    for (variant, env), runs in study.items():
        low, high = scores[env] if scores else (0.0, final(study["dense", env])[1].mean())
        dense_frozen = [run[FROZEN][1].mean() for run in study.get(("dense", env), []) if FROZEN in run]
        result[variant, env] = [dict(run) for run in runs]
        for run in result[variant, env]:
            for tag in set(RETURNS) & set(run):
                run[tag] = run[tag][0], (run[tag][1] - low) / (high - low)
            if FROZEN in run:
                run[FROZEN] = run[FROZEN][0], run[FROZEN][1] / np.mean(dense_frozen)
    return result


def chance_sparsity(
    total: int, first: int, period: int, max_noise: float = 3.0, max_speed: float = 0.01
) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the target's sparsity if losses were random numbers: where EauDe's rule leads without a selection."""
    sys.path.insert(0, str(ROOT))
    from eaudedqn_minatar import Args, next_sparsity, select_population

    rng, args, steps = np.random.default_rng(0), Args(), np.arange(first, total + 1, period)
    curves = np.zeros((10, len(steps)))  # of so many runs
    for curve in curves:
        sparsities = np.zeros(args.n_networks)
        for i, step in enumerate(steps):
            losses = rng.random(args.n_networks)
            curve[i] = sparsities[losses.argmin()]
            parents = select_population(rng, losses, args.tournament_size)
            for k in np.flatnonzero(parents != np.arange(args.n_networks)):
                noise, parent = rng.uniform(0, max_noise), sparsities[parents[k]]
                sparsities[k] = next_sparsity(parent, noise, step, step + period, total, max_speed)
    return steps, curves.mean(axis=0)


def with_interval(scores: Sequence[np.ndarray], statistic: Callable, digits: int) -> str:
    """Of seeds, a row for each task. A single seed has no interval, nor has a mean over tasks of which one has a single
    seed, as it would leave out how much that one varies; nor have equal ones."""
    low, high = bootstrap_interval(scores, statistic)
    varies = low < high and min(map(len, scores)) > 1
    interval = f" ({low:,.{digits}f} to {high:,.{digits}f})" if varies else ""
    return f"{statistic(np.concatenate(scores)):,.{digits}f}{interval}"


def print_table(title: str, study: Study) -> None:
    """Final returns and sparsities, and on MinAtar those of frozen policies: means over seeds, intervals."""
    has_frozen = any(FROZEN in run for runs in study.values() for run in runs)
    names = ["task", "variant", "seeds", "final return", *["frozen"] * has_frozen, "final sparsity"]
    print(f"\n{title}\n\n| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for variant, env in sorted(study, key=lambda key: (key[1], list(study).index(key))):
        runs = study[variant, env]
        sparsities, returns = final(runs)
        frozen = np.array([run[FROZEN][1].mean() for run in runs if FROZEN in run])
        digits = 0 if abs(returns.mean()) > 100 else 1
        columns = [with_interval([x], np.mean, digits) if len(x) else "" for x in (returns, frozen)[: 1 + has_frozen]]
        columns += [with_interval([sparsities], np.mean, 3)]
        print(f"| {env} | {variant} | {len(runs)} | {' | '.join(columns)} |")
    print()


# ---- Parts of figures ------------------------------------------------------------------------------------------------
def new_figure(n_rows: int, n_columns: int, width: float, height: float):
    """Sizes in inches."""
    if not n_columns:
        raise KeyError("its variants")
    figure, axes = plt.subplots(n_rows, n_columns, figsize=(width, height), squeeze=False, layout="constrained")
    for panel in axes.ravel():
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
        panel.set_axisbelow(True)
    return figure, axes


def set_labels(panel, x: str, y: str, title: str = "") -> None:
    panel.set(xlabel=x, ylabel=y, title=title)
    if not x or "steps" in x:
        panel.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))  # 50k, 10M


def seeds_of(runs: list[Curves], tag: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the values of all seeds at each of them: (seeds, steps). Between two points a curve is a line."""
    steps = np.unique(np.concatenate([run[tag][0] for run in runs]))
    return steps, np.array([np.interp(steps, *run[tag]) for run in runs])


def smooth(run: Curves, tag: str) -> Curves:
    """At each step the mean over the tenth of the run that ends there, as in a final return: episodes differ a lot."""
    steps, values = run[tag]
    means = [values[(steps > step - 0.1 * steps[-1]) & (steps <= step)].mean() for step in steps]
    return {**run, tag: (steps, np.array(means))}


def draw_curves(panel, runs: list[Curves], tag: str, style: tuple[str, ...], label: str | None = None) -> None:
    """The mean over seeds, and from the lowest to the highest of them."""
    steps, values = seeds_of(runs, tag)
    panel.plot(steps, values.mean(axis=0), color=style[0], linestyle=style[1], label=label)
    panel.fill_between(steps, values.min(axis=0), values.max(axis=0), color=style[0], alpha=0.15, linewidth=0)


def draw_chance(panels: Sequence, *schedule: float, line: str = "-", label: bool = True, **flags: float) -> None:
    steps, sparsities = chance_sparsity(*schedule, **flags)
    for panel in panels:
        panel.plot(steps, sparsities, color="#888888", linewidth=1, linestyle=line)
    panel.lines[-1].set_label("EauDe, random losses" if label else None)
    symbols = {"max_noise": "U_max", "max_speed": "S_max"}
    setting = "".join(f" with {symbols[flag]} = {value}" for flag, value in flags.items())
    print(f"If losses were random, EauDe{setting} would end at a sparsity of {sparsities[-1]:.2f}.")


def draw_iqm(panel, tasks: list[list[Curves]], tag: str, style: tuple[str, ...], label: str | None = None) -> None:
    """The IQM over tasks and seeds, and its interval."""
    steps, values = seeds_of([run for runs in tasks for run in runs], tag)
    ends = np.cumsum([len(runs) for runs in tasks])[:-1]
    intervals = [bootstrap_interval(np.split(column, ends)) for column in values.T]
    panel.plot(steps, iqm(values, axis=0), color=style[0], linestyle=style[1], label=label)
    panel.fill_between(steps, *np.transpose(intervals), color=style[0], alpha=0.15, linewidth=0)


def draw_point(panel, x: list[np.ndarray], y: list[np.ndarray], statistic: Callable, **options) -> None:
    """Of two statistics of seeds, a row for each task, with their intervals."""
    points = [(statistic(np.concatenate(z)), *bootstrap_interval(z, statistic)) for z in (x, y)]
    x_error, y_error = [[[middle - low], [high - middle]] for middle, low, high in points]
    panel.errorbar(points[0][0], points[1][0], y_error, x_error, capsize=2, **options)


def draw_tasks(study: Study, lines: Lines, tags: Sequence[str], n_more: int = 0):
    """A row for each curve, a column for each task, and `n_more` columns. Rows of a single task stand side by side."""
    envs = sorted({env for _, env in study})
    n_columns = len(envs) + n_more
    shape = (len(tags), n_columns) if n_columns > 1 else (1, len(tags))
    figure, axes = new_figure(*shape, min(11, 2 + 3.5 * shape[1]), 0.6 + 2.8 * shape[0])
    grid = axes.reshape(len(tags), n_columns)
    for (column, env), (variant, (style, label)) in itertools.product(enumerate(envs), lines.items()):
        for row, tag in enumerate(tags):
            if (variant, env) in study:
                draw_curves(grid[row, column], study[variant, env], tag, style, label)
            set_labels(grid[row, column], "steps", AXES[tag] if column == 0 else "", env if row == 0 else "")
    return figure, grid


def draw_legend(figure, n_columns: int) -> None:
    """Of all panels, each label once."""
    handles = {}
    for panel in figure.axes:
        handles |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels()) if label not in handles}
    figure.legend(handles.values(), handles, loc="outside upper center", ncols=n_columns)


def draw_front(panel, study: Study, env: str, families: dict) -> None:
    """Final sparsities and returns, a line for each family: {name: (style, variants)}."""
    for name, (style, variants) in families.items():
        points = [final(study[variant, env]) for variant in variants if (variant, env) in study]
        means = [(sparsities.mean(), returns.mean()) for sparsities, returns in points]
        panel.plot(*np.transpose(means), color=style[0], linestyle=style[1], marker=style[2], markersize=4, label=name)
        for sparsities, returns in points:
            draw_point(panel, [sparsities], [returns], np.mean, color=style[0])
    set_labels(panel, "final sparsity", "final return", env)


# ---- Figures: dense agents -------------------------------------------------------------------------------------------
def draw_baselines():
    """Our dense agents beside those of other libraries, same settings and as many seeds: a panel for each task."""
    theirs = load_study("baselines")
    figure, (panels,) = new_figure(1, len(theirs), 9, 3.4)
    print("\n| task | agent | seeds | final return |", "|---|---|---|---|", sep="\n")
    for panel, ((variant, env), runs) in zip(panels, theirs.items()):
        name, study, tag = LIBRARIES[variant]
        ours = load_study(study, seeds=range(1, len(runs) + 1))["dense", env]
        for label, style, seeds in (("ours", DENSE, ours), (name, OTHERS, runs)):
            returns = np.array([final_return(run) for run in seeds])
            interval = with_interval([returns], np.mean, 0 if returns.mean() > 100 else 1)
            print(f"| {env} | {label} | {len(seeds)} | {interval} |")
            draw_curves(panel, seeds, tag, style, "ours" if style is DENSE else "theirs")
        set_labels(panel, "steps", AXES[tag], f"{env}, {name}")
    print()
    draw_legend(figure, 2)
    return figure


# ---- Figures: MinAtar ------------------------------------------------------------------------------------------------
def named(base: str, variants: Lines = ALGORITHMS) -> Lines:
    return {variant: (style, label.format(base)) for variant, (style, label) in variants.items()}


def print_iqms(study: Study, lines: Lines, base: str) -> None:
    """Of normalised returns, on MinAtar those of frozen policies, and the sparsities beside them."""
    has_frozen = any(FROZEN in run for runs in study.values() for run in runs)
    names = [f"final return / dense {base}'s, IQM", *["frozen, IQM"] * has_frozen, "final sparsity, IQM"]
    print(f"| algorithm | {' | '.join(names)} | runs |", f"|{'---|' * (len(names) + 2)}", sep="\n")
    for variant, (_, label) in lines.items():
        tasks = [runs for (other, _), runs in study.items() if other == variant]
        if tasks:
            sparsities, returns = zip(*map(final, tasks))
            frozen = [np.array([run[FROZEN][1].mean() for run in runs if FROZEN in run]) for runs in tasks]
            iqms = [with_interval(x, iqm, 2) for x in (returns, *[frozen] * has_frozen, sparsities)]
            print(f"| {label} | {' | '.join(iqms)} | {sum(map(len, tasks))} |")
    print()


def draw_minatar(name: str, title: str):
    """Returns, a panel for each game, and their IQM in units of dense DQN's final mean."""
    study = load_study(name)
    print_table(title, study)
    envs, lines = sorted({env for _, env in study}), named("DQN")
    study = {key: runs for key, runs in study.items() if all((key[0], env) in study for env in envs)}
    normalised = normalise(study)
    print_iqms(normalised, lines, "DQN")
    n_columns = min(3, len(envs) + 1)
    figure, axes = new_figure(-(-(len(envs) + 1) // n_columns), n_columns, 9, 5.4)
    for variant, (style, label) in lines.items():
        for panel, env in zip(axes.ravel(), envs):
            if (variant, env) in study:
                draw_curves(panel, study[variant, env], RETURNS[1], style, label)
        if (variant, envs[0]) in study:
            draw_iqm(axes.ravel()[len(envs)], [normalised[variant, env] for env in envs], RETURNS[1], style)
    for panel, env in zip(axes.ravel(), [*envs, "IQM / dense DQN's end"]):
        set_labels(panel, "steps", "return in training" if panel in axes[:, 0] else "", env)
    for panel in axes.ravel()[len(envs) + 1 :]:
        panel.remove()
    draw_legend(figure, 4)
    return figure


def draw_minatar_sparsity():
    """Sparsities on the way, the IQM over games, and at the end in each game, for each size of the hidden layer."""
    sizes = {"minatar_small": 32, "minatar": 128, "minatar_large": 512}
    studies = {name: load_study(name) for name in sizes if name == "minatar" or (RESULTS / f"{name}.csv").exists()}
    envs = sorted({env for study in studies.values() for _, env in study})
    figure, ((left, right),) = new_figure(1, 2, 9, 3.8)
    rows = []
    for i, (name, study) in enumerate(studies.items()):
        style, label = SIZES[sizes[name]], f"EauDeDQN, {sizes[name]} hidden units"
        tasks = {env: study["eaude", env] for env in envs if ("eaude", env) in study}
        draw_iqm(left, list(tasks.values()), "sparsity/target", style, label)
        for env, runs in tasks.items():
            sparsities = [final(runs)[0]]
            place = [np.full(len(runs), envs.index(env) + 0.2 * (i - (len(studies) - 1) / 2))]
            draw_point(right, place, sparsities, np.mean, color=style[0], marker=style[2], linestyle="")
            rows.append(f"| {env} | {sizes[name]} | {len(runs)} | {with_interval(sparsities, np.mean, 3)} |")
    polyprune = [runs for (variant, _), runs in studies["minatar"].items() if variant == "polyprune"]
    if polyprune:
        draw_iqm(left, polyprune, "sparsity/target", POLYPRUNE, "PolyPruneDQN")
    print("\nMinAtar, final sparsities of EauDeDQN\n")
    print("| game | hidden units | seeds | final sparsity |", "|---|---|---|---|", *sorted(rows), "", sep="\n")
    draw_chance([left], *MINATAR, max_speed=0.04)
    set_labels(left, "steps", "sparsity (IQM of the games)")
    set_labels(right, "", "final sparsity")
    right.set(xlim=(-0.5, len(envs) - 0.5), ylim=(0, 1))
    right.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(range(len(envs))))
    right.xaxis.set_major_formatter(
        matplotlib.ticker.FixedFormatter([re.sub("(?<=[a-z])(?=[A-Z])", "\n", env) for env in envs])
    )
    draw_legend(figure, 3)
    return figure


def draw_variants(title: str, names: Sequence[str], lines: Lines, base: str = "DQN", seeds: Sequence[int] = range(100)):
    """Returns and sparsities of some variants of several studies, in the tasks of the last one."""
    envs, study = {env for _, env in load_study(names[-1])}, load_study(*names, seeds=seeds)
    study = {(variant, env): study[variant, env] for variant in lines for env in envs if (variant, env) in study}
    print_table(title, study)
    returns = next(tag for tag in RETURNS if tag in next(iter(study.values()))[0])
    figure, _ = draw_tasks(study, named(base, lines), (returns, "sparsity/target"))
    draw_legend(figure, 3)
    return figure


def draw_minatar_regimes():
    study = load_study("minatar", "minatar_regimes", seeds=(1, 2, 3))  # those that both have
    envs = sorted({env for variant, env in study if variant == "eaude_10"})
    families = {
        "EauDeDQN, with $U_{max}$": (EAUDE, ["eaude", "eaude_10", "eaude_30"]),
        "PolyPruneDQN": (
            POLYPRUNE,
            ["dense", "polyprune_50", "polyprune_80", "polyprune_90", "polyprune", "polyprune_99"],
        ),
    }
    variants = [variant for _, family in families.values() for variant in family]
    print_table("Regimes, MinAtar", {key: runs for key, runs in study.items() if key[0] in variants and key[1] in envs})
    figure, (panels,) = new_figure(1, len(envs), 9, 3.8)
    for panel, env in zip(panels, envs):
        draw_front(panel, study, env, families)
        for variant, noise in (("eaude", 3), ("eaude_10", 10), ("eaude_30", 30)):
            if (variant, env) in study:
                point = [x.mean() for x in final(study[variant, env])]
                panel.annotate(noise, point, (-9, -13), textcoords="offset points", ha="center", color=EAUDE[0])
    draw_legend(figure, 2)
    return figure


def draw_minatar_ladder():
    """A bar for each rung: final returns, and the sparsities beside them."""
    study = load_study("minatar", "minatar_ladder", "minatar_ladder_adam")
    envs = sorted({env for variant, env in study if variant == "selection"})
    study = {(rung, env): study[rung, env] for rung in RUNGS for env in envs if (rung, env) in study}
    print_table("Ladder, MinAtar", study)
    figure, (panels,) = new_figure(1, len(envs), 9, 3.6)
    for panel, env in zip(panels, envs):
        for i, (rung, (colour, _)) in enumerate(RUNGS.items()):
            if (rung, env) in study:
                sparsities, returns = final(study[rung, env])
                low, high = bootstrap_interval([returns], np.mean)
                panel.barh(i, returns.mean(), color=colour)
                panel.errorbar(
                    returns.mean(), i, xerr=[[returns.mean() - low], [high - returns.mean()]], color="#888888"
                )
                text = f" sparsity {sparsities.mean():.2f}" if sparsities.mean() else ""
                panel.text(high, i, text, va="center", fontsize="small")
        panel.set(
            xlabel="final return", title=env, yticks=range(len(RUNGS)), yticklabels=[x for _, x in RUNGS.values()]
        )
        panel.margins(x=0.35)
        panel.invert_yaxis()
        panel.label_outer()
    return figure


def draw_minatar_tournaments():
    """Copies of Breakout, seed 1: how their loss compares with their parent's, over what they lost."""
    study = load_study("minatar", "minatar_distributions", seeds=(1,))
    variants = {"eaude": "erk", "eaude_global": "global", "eaude_uniform": "uniform"}
    runs = {name: study[variant, "Breakout"][0] for variant, name in variants.items() if (variant, "Breakout") in study}
    figure, (panels,) = new_figure(1, len(runs), 9, 3.8)
    print(
        "\n| distribution | steps | pruned | copies | win | loss relative to the parent's, median |",
        "|---|---|---|---|---|---|",
        sep="\n",
    )
    edges = np.array([0, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04 - 1e-6, 0.04 + 1e-6])  # the last are at S_max
    for panel, (name, run) in zip(panels, runs.items()):
        (steps, pruned), (_, losses) = [run[tag] for tag in TOURNAMENTS]
        is_late = steps > 0.4 * steps[-1]
        for late, colour, period in (
            (False, LIGHT_EAUDE, "first 40 % of the run"),
            (True, DARK_EAUDE, "rest of the run"),
        ):
            chosen = is_late == late
            panel.plot(100 * pruned[chosen], 100 * losses[chosen], ".", color=colour, markersize=3, alpha=0.4)
            medians = []
            for low, high in itertools.pairwise(edges):
                part = losses[chosen & (pruned >= low) & (pruned < high)]
                if len(part):
                    medians.append((50 * (low + high), 100 * np.median(part)))
                    shares = f"{100 * low:.3g} to {100 * high:.3g} %" if high - low > 1e-3 else f"{100 * high:.3g} %"
                    won = f"{(part < 0).mean():.2f} | {100 * np.median(part):+.2f} %"
                    print(f"| {name} | {period} | {shares} | {len(part)} | {won} |")
            panel.plot(*np.transpose(medians), color=colour, marker="o", label=f"median, {period}")
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_ylim(-3, 6)
        set_labels(
            panel, "pruned, % of what was left", "loss relative to the parent's, %" if panel is panels[0] else "", name
        )
    print()
    draw_legend(figure, 2)
    return figure


# ---- Figures: other worlds -------------------------------------------------------------------------------------------
def draw_small_mujoco():
    study = load_study("small_mujoco")
    print_table("MuJoCo, 100,000 steps", study)
    study, lines = complete(study), named("SAC")
    normalised, envs = normalise(study), sorted({env for _, env in study})
    figure, axes = draw_tasks(study, lines, (RETURNS[0], "sparsity/target"), n_more=1)
    for variant, (style, _) in lines.items():
        tasks = [normalised[variant, env] for env in envs if (variant, env) in normalised]
        if tasks:
            draw_iqm(axes[0, -1], tasks, RETURNS[0], style)
            sparsities, returns = zip(*map(final, tasks))
            beside = [x + 0.05 * (variant == "oracle") for x in sparsities]  # which has those of EauDeSAC
            draw_point(axes[1, -1], beside, returns, iqm, color=style[0], marker=style[2], markerfacecolor="none")
    print_iqms(normalised, lines, "SAC")
    set_labels(axes[0, -1], "steps", "", "IQM / dense SAC's end")
    set_labels(axes[1, -1], "final sparsity", "final return (IQM)")
    draw_chance(axes[1, :-1], 100_000, 5_100, 100)
    for panel in axes[:, :-1].ravel():
        panel.set_xlim(0, 100_000)
    draw_legend(figure, 5)
    return figure


def draw_small_regimes():
    study = load_study("small_mujoco", "small_regimes", seeds=(1, 2))  # those that both have
    study = {key: runs for key, runs in study.items() if key[1] == "HalfCheetah" and key[0] != "oracle"}
    print_table("Regimes, HalfCheetah, 100,000 steps", study)
    figure, ((left, right),) = new_figure(1, 2, 9, 3.8)
    hand_made = ["dense", "polyprune_50", "polyprune_80", "polyprune_90", "polyprune", "polyprune_99"]
    families = {
        "EauDeSAC, with $U_{max}$": (EAUDE, ["eaude_0", "eaude", "eaude_10", "eaude_30"]),
        "PolyPruneSAC": (POLYPRUNE, hand_made),
        "PolyPruneSAC, global": ((POLYPRUNE[0], "", "P"), ["polyprune_global"]),
    }
    draw_front(left, study, "HalfCheetah", families)
    for variant, noise, line in (("eaude_0", 0, ""), ("eaude", 3, "-"), ("eaude_10", 10, "--"), ("eaude_30", 30, ":")):
        runs = study[variant, "HalfCheetah"]
        sparsities, returns = final(runs)
        point, end = (sparsities.mean(), returns.mean()), (100_000, sparsities.mean())
        beside = 11 if noise in (0, 30) else -10  # the last three end close to each other
        left.annotate(noise, point, (beside, -13), textcoords="offset points", ha="center", color=EAUDE[0])
        if noise:
            draw_curves(right, runs, "sparsity/target", (EAUDE[0], line))
            right.annotate(noise, end, (4, 0 if noise == 30 else -6), textcoords="offset points", color=EAUDE[0])
            draw_chance([right], 100_000, 5_100, 100, max_noise=noise, line=line, label=noise == 3)
    set_labels(right, "steps", "sparsity")
    draw_legend(figure, 4)
    return figure


def draw_small_atari():
    study = load_study("small_atari", "small_atari_erk")
    print_table("KungFuMaster, 120,000 steps", study)
    study = {key: [smooth(run, RETURNS[1]) for run in runs] for key, runs in study.items()}
    figure, ((_,), (right,)) = draw_tasks(study, named("DQN", KUNG_FU_MASTER), (RETURNS[1], "sparsity/target"))
    for max_speed, line in ((0.03, "-"), (0.01, "--")):
        draw_chance([right], 120_000, 5_000, 1_000, max_speed=max_speed, line=line, label=max_speed == 0.03)
    draw_legend(figure, 3)
    return figure


def draw_small_offline():
    study = load_study("small_offline")
    print_table("KungFuMaster, offline, 40,000 gradient steps", study)
    figure, grid = draw_tasks(study, named("CQL"), (RETURNS[0], "sparsity/target", "losses/cumulated"))
    draw_chance(grid[1], 40_000, 400, 400)
    draw_legend(figure, 4)
    return figure


def draw_paper(name: str, base: str, scores: dict[str, tuple[float, float]] | None = None):
    """A study of the paper, with a column for each size or length: IQM over tasks and seeds, as there."""
    study = load_study(name)
    print_table(name, study)
    columns = sorted({variant.partition("_")[2] for variant, _ in study}, reverse=True)  # small first, or short
    figure, axes = new_figure(2, len(columns), 1 + 3.3 * len(columns), 5.4)
    for column, size in enumerate(columns):
        chosen = [(variant, env) for variant, env in study if variant.endswith(f"_{size}")]
        part = {(variant.partition("_")[0], env): study[variant, env] for variant, env in chosen}
        part = normalise(complete(part), scores)
        for variant, (style, label) in ALGORITHMS.items():
            tasks = [runs for (other, _), runs in part.items() if other == variant]
            if tasks:
                returns = next(tag for tag in RETURNS if tag in tasks[0][0])
                draw_iqm(axes[0, column], tasks, returns, style, label.format(base) if column == 0 else None)
                draw_iqm(axes[1, column], tasks, "sparsity/target", style)
        n_tasks = len({env for _, env in part})
        set_labels(axes[0, column], "", "normalised return (IQM)" if column == 0 else "", f"{size}, {n_tasks} tasks")
        set_labels(axes[1, column], "steps", "sparsity (IQM)" if column == 0 else "")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def draw_population():
    (runs,) = load_study("population").values()
    (run,) = runs
    figure, ((panel,),) = new_figure(1, 1, 9, 4.4)
    draw_tree(panel, *population(run))
    return figure


def draw_tree(panel, steps: np.ndarray, sparsities: np.ndarray, losses: np.ndarray, parents: np.ndarray) -> None:
    """A line for each network, at the height of its sparsity, from one target update to the next."""
    n_networks = parents.shape[1]
    gap = 0.002 * (np.ptp(sparsities) or 1.0)  # between equal ones: too small to look like a pruning
    heights = sparsities + gap * (np.arange(n_networks) - n_networks // 2)
    period, best = steps[1] - steps[0], losses.argmin(axis=1)
    other, chosen = dict(color="#888888", linewidth=1.2), dict(color=EAUDE[0], linewidth=2.5, zorder=3)
    lost = dict(color="black", marker="x", linestyle="", markersize=6, zorder=4)
    crown = dict(color="#F0E442", marker=CROWN, linestyle="", markeredgecolor="black", markersize=13, zorder=5)
    for i, step in enumerate(steps):
        for k in range(n_networks):
            start = heights[i, k] if i == 0 else heights[i - 1, int(parents[i - 1, k])]
            times = step - period, step - 0.75 * period, step  # a copy leaves its parent's line after the update
            panel.plot(times, [start, heights[i, k], heights[i, k]], **(chosen if k == best[i] else other))
            if k not in parents[i]:
                panel.plot(step, heights[i, k], **lost)
        panel.plot(step, heights[i, best[i]], **crown)
    legend = {
        "a network of the population; branches are copies, pruned further": other,
        "the one with the lowest cumulated loss until the next target update": chosen,
        "there it becomes the target": crown,
        "not selected: a copy takes its place": lost,
    }
    panel.legend([plt.Line2D([], [], **style) for style in legend.values()], legend, loc="lower right")
    set_labels(panel, "environment steps", "sparsity")


# ---- Figures: tutorial.ipynb -----------------------------------------------------------------------------------------
def draw_arrow(panel, start, end, colour: str = "#888888", bend: float = 0.0, width: float = 1.3) -> None:
    style = dict(arrowstyle="-|>", color=colour, linewidth=width, connectionstyle=f"arc3,rad={bend}")
    panel.annotate("", end, start, arrowprops=style)


def draw_box(panel, x: float, y: float, text: str, colour: str = "black") -> None:
    style = dict(boxstyle="round,pad=0.45", edgecolor=colour, facecolor="white", linewidth=1.5)
    panel.text(x, y, text, ha="center", va="center", bbox=style)


def draw_network(panel, x: float, y: float, sparsity: float, colour: str) -> None:
    """A bar: full is dense, empty is pruned."""
    panel.barh(y, 1.4, 0.5, x - 0.7, color="white", edgecolor=colour, linewidth=1.5)
    panel.barh(y, 1.4 * (1 - sparsity), 0.5, x - 0.7, color=colour, alpha=0.55)


def draw_algorithm() -> None:
    """One target update of EauDe: from the left to the right what learns, what is compared, who is copied."""
    losses, sparsities = [5, 1, 4, 2, 3], [0.6, 0.45, 0.5, 0.3, 0.4]
    parents, further = [1, 1, 3, 3, 4], [0.15, 0, 0.12, 0, 0]  # what a copy loses
    _, ((panel,),) = new_figure(1, 1, 9, 4.6)
    panel.set(xlim=(-0.2, 11.2), ylim=(-0.9, 5.9), xticks=[], yticks=[])
    panel.spines[:].set_visible(False)
    draw_box(panel, 1, 2, "replay\nmemory")
    draw_box(panel, 4, 5.4, r"target network $\bar\theta$", EAUDE[0])
    for k, parent in enumerate(parents):
        y, colour = 4 - k, EAUDE[0] if k == 1 else "#555555"
        draw_arrow(panel, (1.75, 2), (3.25, y))
        draw_network(panel, 4, y, sparsities[k], colour)
        panel.barh(y, 0.15 * losses[k], 0.3, 5.6, color=colour)
        panel.text(5.5, y, f"$L_{k}$", ha="right", va="center")
        draw_arrow(panel, (7.5, 4 - parent), (9.25, y), "black" if k == parent else EAUDE[0])
        draw_network(panel, 10, y, sparsities[parent] + further[k], EAUDE[0] if parent == 1 else "#555555")
        panel.text(10.8, y, "stays" if k == parent else "copy,\npruned", va="center", fontsize="small")
    panel.plot(6.1, 3, marker=CROWN, color="#F0E442", markeredgecolor="black", markersize=13)
    draw_arrow(panel, (6.3, 3.15), (4.95, 5.4), EAUDE[0], 0.8, 2)  # past the longest loss
    panel.text(6.9, 5.2, "every $T$ steps:\nlowest loss becomes the target", color=EAUDE[0], va="center")
    draw_arrow(panel, (4, 5.05), (4, 4.35), EAUDE[0], width=2)
    panel.text(3.85, 4.68, "the same $y$ for all", ha="right", va="center", color=EAUDE[0])
    captions = {4: "$K$ online networks\n(full: dense, empty: pruned)", 6.2: "cumulated\nlosses"}
    for x, text in (captions | {8.4: "tournaments", 10: "the next $K$\nnetworks"}).items():
        panel.text(x, -0.7, text, ha="center", va="center")


def draw_schedules(steps: np.ndarray, schedules: dict, field: dict, runs: list, stretch: int) -> None:
    """Left Eq. (2), {final sparsity: curve}. Right Eq. (3), {(step, sparsity): (mean, fastest) at the next target
    update}, whose arrows are as long as `stretch` updates, and the targets of some runs."""
    figure, ((left, right),) = new_figure(1, 2, 9, 4.2)
    period = steps[1] - steps[0]
    for (final_value, curve), line in zip(schedules.items(), (":", "--", "-")):
        left.plot(steps, curve, color=POLYPRUNE[0], linestyle=line, label=f"$s_F$ = {final_value}")
    left.legend()
    for (step, sparsity), (mean, fastest) in field.items():
        for end, colour in ((fastest, "#CCCCCC"), (mean, "#555555")):
            tip = step + stretch * period, sparsity + stretch * (end - sparsity)
            draw_arrow(right, (step, sparsity), tip, colour, width=1)
    right.plot(steps, np.transpose(runs), color=EAUDE[0], linewidth=0.8, alpha=0.8)
    arrow = dict(linestyle="", marker=r"$\rightarrow$", markersize=15)
    legend = {
        "a copy, mean": dict(color="#555555", **arrow),
        "fastest copy": dict(color="#CCCCCC", **arrow),
        "target, random losses": dict(color=EAUDE[0], linewidth=0.8),
    }
    handles = [plt.Line2D([], [], **style) for style in legend.values()]
    figure.legend(handles, legend, loc="outside lower right", ncols=3)
    for panel, title in ((left, "PolyPrune, Eq. (2)"), (right, "EauDe, Eq. (3)")):
        panel.set(ylim=(0, 1.02), xlim=(0, steps[-1] + period))
        set_labels(panel, "steps", "sparsity", title)


def draw_masks(kernels: dict[str, np.ndarray]) -> None:
    """Matrices (inputs, units), one above the other: what is not zero has a colour."""
    _, panels = new_figure(len(kernels), 1, 9, 1.3 * len(kernels))
    colours = matplotlib.colors.LinearSegmentedColormap.from_list("kept", ["white", EAUDE[0]], N=4)  # a small file
    for (panel,), (name, kernel) in zip(panels, kernels.items()):
        shades = dict(cmap=colours, vmin=0, vmax=1, interpolation="antialiased", interpolation_stage="data")
        panel.imshow((kernel.T != 0).astype(float), aspect="auto", **shades)
        panel.grid(False)
        set_labels(panel, "", "unit", f"{name}: {np.mean(kernel == 0):.1%} of the hidden layer is zero")
        panel.set(xticks=[], yticks=[])
    panel.set_xlabel("inputs: rows of the screen from the top to the bottom, in each its columns, in each its channels")


def draw_values(positions: np.ndarray, values: dict[str, np.ndarray], colours: bytes) -> None:
    """Screens of MinAtar (positions, 10, 10, channels), and below each what some networks think that it is worth."""
    figure, ((screens,), (panel,)) = new_figure(2, 1, 9, 3.2)
    pictures = np.where(positions.any(axis=3), 1 + positions.argmax(axis=3), 0)
    pictures = np.frombuffer(colours, np.uint8).reshape(-1, 3)[pictures]
    gaps = np.pad(pictures, ((0, 0), (0, 0), (1, 1), (0, 0)), constant_values=255)
    screens.imshow(np.concatenate(gaps, axis=1), extent=(-0.5, len(positions) - 0.5, 0, 10 / 12))
    screens.set_axis_off()
    styles = zip("Dos^", (EAUDE[0], "#56B4E9", "#CC79A7", "#888888"))
    for (name, q), (marker, colour) in zip(values.items(), styles):
        panel.plot(q.max(axis=1), marker=marker, color=colour, label=name)
    panel.set(xlim=screens.get_xlim(), xticks=range(len(positions)))
    set_labels(panel, "position", r"$\max_a Q(s, a)$")
    draw_legend(figure, len(values))


def draw_layers(kept: dict[str, dict[str, float]], labels: Sequence[str]) -> None:
    """{distribution: {layer: share of its weights}}"""
    _, ((panel,),) = new_figure(1, 1, 9, 3.2)
    styles = (EAUDE[0], "//"), (LIGHT_EAUDE, ""), (DARK_EAUDE, "..")
    for i, ((name, shares), (colour, hatch)) in enumerate(zip(kept.items(), styles)):
        places = np.arange(len(shares)) + 0.27 * (i - 1)
        bars = panel.barh(places, shares.values(), 0.25, color=colour, hatch=hatch, edgecolor="white", label=name)
        panel.bar_label(bars, [f"{x:.0%}" for x in shares.values()], padding=3)
    panel.set(yticks=range(len(labels)), yticklabels=labels, xlim=(0, 1.1))
    panel.set_xlabel("share of the weights that is kept")
    panel.invert_yaxis()
    panel.legend(loc="center right")


def draw_tournament(losses: np.ndarray, draws: list[np.ndarray], parents: np.ndarray) -> None:
    """A row for each selection, the first of which is among all networks, and then the next population."""
    _, ((panel,),) = new_figure(1, 1, 9, 3.8)
    networks = np.arange(len(losses))
    for row, drawn in enumerate([networks, *draws]):
        for some, colour in ((networks, "#DDDDDD"), (drawn, "#555555")):
            panel.plot(some, [row] * len(some), "o", color=colour, markersize=9)
        marker, size = (CROWN, 15) if row == 0 else ("*", 19)
        winner = drawn[losses[drawn].argmin()]
        panel.plot(winner, row, marker=marker, color="#F0E442", markeredgecolor="black", markersize=size)
    last = len(draws) + 1.3
    for k, parent in enumerate(parents):
        stays = k == parent
        panel.plot(k, last, "s", color=EAUDE[0], markersize=26, fillstyle="full" if stays else "none")
        panel.text(k, last, parent, ha="center", va="center", color="white" if stays else EAUDE[0], weight="bold")
        panel.text(k + 0.17, last, f"{k} stays" if stays else f"copy of {parent}", va="center")
    rows = ["lowest of all", *(f"tournament {i}" for i in range(1, len(draws) + 1)), "next population"]
    panel.set(yticks=[*range(len(draws) + 1), last], yticklabels=rows)
    panel.set(xticks=networks, xticklabels=[f"network {k}\nloss {x:g}" for k, x in enumerate(losses)])
    panel.set(xlim=(-0.4, len(losses) - 0.1), ylim=(last + 0.5, -0.5))
    panel.xaxis.tick_top()
    panel.grid(False)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)


def draw_selection(losses: np.ndarray, counted: np.ndarray, expected: np.ndarray, probabilities: np.ndarray) -> None:
    _, ((left, right),) = new_figure(1, 2, 9, 3)
    networks = np.arange(len(losses))
    left.bar(networks - 0.2, counted, 0.38, color=EAUDE[0], label="10,000 calls")
    left.bar(networks + 0.2, expected, 0.38, color="white", edgecolor="black", hatch="//", label="formula")
    left.legend()
    right.bar(networks, probabilities, 0.6, color=EAUDE[0])
    for panel, title in ((left, "selected, times per update"), (right, "probability to act")):
        panel.set(xticks=networks, xticklabels=[f"loss {x:g}" for x in losses], title=title)


# ---- All figures -----------------------------------------------------------------------------------------------------
MINATAR = 500_000, 6_000, 2_000  # steps, the first target update, and from one to the next
SIZES = {32: (LIGHT_EAUDE, ":", "v"), 128: EAUDE, 512: (DARK_EAUDE, "-.", "^")}  # of the hidden layer
RUNGS = {
    "dense": (DENSE[0], "dense DQN"),
    "single": (LIGHT_EAUDE, "EauDeDQN, K = 1"),
    "selection": (LIGHT_EAUDE, "EauDeDQN, no pruning"),
    "selection_adam": (LIGHT_EAUDE, "the same, copies\nkeep their Adam"),
    "eaude": (EAUDE[0], "EauDeDQN"),
    "eaude_adam": (LIGHT_EAUDE, "EauDeDQN, copies\nkeep their Adam"),
    "oracle": (ORACLE[0], "PolyPruneDQN, oracle"),
    "polyprune": (POLYPRUNE[0], "PolyPruneDQN, 0.95"),
}
DISTRIBUTIONS = {
    "dense": (DENSE, "dense {}"),
    "eaude": (EAUDE, "EauDe{}, erk"),
    "eaude_global": ((LIGHT_EAUDE, "--"), "EauDe{}, global"),
    "eaude_uniform": ((DARK_EAUDE, "-."), "EauDe{}, uniform"),
    "polyprune": (POLYPRUNE, "PolyPrune{}, erk"),
    "polyprune_global": ((LIGHT_POLYPRUNE, ":"), "PolyPrune{}, global"),
    "polyprune_uniform": ((DARK_POLYPRUNE, "-."), "PolyPrune{}, uniform"),
}
SAC_DISTRIBUTIONS = {  # as above; those without a suffix were made with uniform
    "dense": DISTRIBUTIONS["dense"],
    "eaude_erk": DISTRIBUTIONS["eaude"],
    "eaude_global": DISTRIBUTIONS["eaude_global"],
    "eaude": DISTRIBUTIONS["eaude_uniform"],
    "polyprune_erk": DISTRIBUTIONS["polyprune"],
    "polyprune_global": DISTRIBUTIONS["polyprune_global"],
    "polyprune": DISTRIBUTIONS["polyprune_uniform"],
}
LENGTHS = {
    "dense_2000": (DENSE, "dense {}, 2,000,000"),
    "eaude_250": ((LIGHT_EAUDE, ":"), "EauDe{}, 250,000 steps"),
    "eaude": ((LIGHT_EAUDE, "-"), "500,000"),
    "eaude_1000": (EAUDE, "1,000,000"),
    "eaude_2000": ((DARK_EAUDE, "-."), "2,000,000"),
}
NETWORKS = {
    "eaude_k2": ((LIGHT_EAUDE, ":"), "EauDe{}, K = 2"),
    "eaude": (EAUDE, "K = 5"),
    "eaude_k10": ((DARK_EAUDE, "-."), "K = 10"),
}
CRITICS = {
    "eaude": (EAUDE, "EauDe{}, 256-256"),
    "eaude_32": ((LIGHT_EAUDE, ":"), "32-32"),
    "eaude_32_erk": ((LIGHT_EAUDE, "--"), "32-32, erk"),
    "eaude_32_global": ((LIGHT_EAUDE, "-."), "32-32, global"),
    "eaude_512": ((DARK_EAUDE, (0, (5, 1))), "512-512"),
}
KUNG_FU_MASTER = {
    "dense": ALGORITHMS["dense"],
    "eaude_erk": (EAUDE, "EauDe{}, $S_{{max}}$ = 0.03"),
    "eaude": ((LIGHT_EAUDE, "-"), "EauDe{}, $S_{{max}}$ = 0.03, uniform"),
    "eaude_slow": ((LIGHT_EAUDE, "-."), "EauDe{}, $S_{{max}}$ = 0.01, uniform"),
    "polyprune_erk": ALGORITHMS["polyprune"],
    "polyprune": ((LIGHT_POLYPRUNE, "--"), "PolyPrune{}, 0.95, uniform"),
}
LIBRARIES = {  # their name, the study in which our dense agent has the same settings, and the curve
    "sb3": ("Stable-Baselines3", "minatar", RETURNS[1]),
    "sbx": ("SBX", "small_mujoco", RETURNS[0]),
}
FIGURES = {
    "baselines": draw_baselines,
    "minatar": lambda: draw_minatar("minatar", "MinAtar, 500,000 steps, 128 hidden units"),
    "minatar_sparsity": draw_minatar_sparsity,
    "minatar_ladder": draw_minatar_ladder,
    "minatar_tournaments": draw_minatar_tournaments,
    "minatar_small": lambda: draw_minatar("minatar_small", "MinAtar, 500,000 steps, 32 hidden units"),
    "minatar_distributions": lambda: draw_variants(
        "Distributions, MinAtar", ["minatar", "minatar_distributions"], DISTRIBUTIONS, seeds=(1, 2, 3)
    ),
    "minatar_lengths": lambda: draw_variants("Lengths, MinAtar", ["minatar_small", "minatar_lengths"], LENGTHS),
    "minatar_regimes": draw_minatar_regimes,
    "minatar_large": lambda: draw_minatar("minatar_large", "MinAtar, 500,000 steps, 512 hidden units"),
    "minatar_networks": lambda: draw_variants(
        "Networks, MinAtar", ["minatar", "minatar_networks"], NETWORKS, seeds=(1, 2)
    ),
    "population": draw_population,
    "small_mujoco": draw_small_mujoco,
    "small_mujoco_distributions": lambda: draw_variants(
        "Distributions, HalfCheetah, 100,000 steps",
        ["small_mujoco", "small_mujoco_distributions"],
        SAC_DISTRIBUTIONS,
        "SAC",
    ),
    "small_regimes": draw_small_regimes,
    "small_sizes": lambda: draw_variants(
        "Sizes of the critics, HalfCheetah, 100,000 steps", ["small_mujoco", "small_sizes"], CRITICS, "SAC"
    ),
    "small_atari": draw_small_atari,
    "small_offline": draw_small_offline,
    "atari": lambda: draw_paper("atari", "DQN", SCORES),
    "atari_lengths": lambda: draw_paper("atari_lengths", "DQN", SCORES),
    "atari_offline": lambda: draw_paper("atari_offline", "CQL", SCORES),
    "mujoco": lambda: draw_paper("mujoco", "SAC"),
}


def main(args: Args) -> None:
    if args.folder:
        print(collect(args.folder))
        return
    if args.only and args.only not in FIGURES:
        fail(f"--only takes one of {', '.join(FIGURES)}")
    for name in [args.only] if args.only else FIGURES:
        try:
            figure = FIGURES[name]()
        except (FileNotFoundError, KeyError) as error:
            message = f"{name} is not drawn: there is no {getattr(error, 'filename', f'finished run of {error}')}"
            if args.only:
                fail(message)
            print(message)
            continue
        path = RESULTS / f"{name}.png"
        figure.savefig(path, dpi=150)
        plt.close(figure)
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the size
        print(path)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
