"""The raw curves of a study as a CSV file, and the figures and tables that are made from these files alone.

python benchmark/plot.py runs/small_mujoco     # writes benchmark/results/small_mujoco.csv
python benchmark/plot.py                       # draws all figures, prints all tables
python benchmark/plot.py --only small_regimes  # one of them, named as the study
"""

import csv
import dataclasses
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

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
N_POINTS = 50  # of a curve in a CSV file, unless it is one of evaluations
N_RESAMPLES = 2_000  # of a bootstrap interval
COLUMNS = "study", "variant", "env", "seed", "tag", "step", "value"
# Colours of Okabe and Ito, which colour-blind people can tell apart; each algorithm has its own line and marker, too.
DENSE, EAUDE = ("#000000", ":", "o"), ("#D55E00", "-", "D")
POLYPRUNE, ORACLE = ("#0072B2", "--", "s"), ("#009E73", "-.", "^")
# Random and human scores, from Wang et al., "Dueling Network Architectures for Deep Reinforcement Learning", 2016.
SCORES = {
    "Asterix": (210.0, 8503.3),
    "BankHeist": (14.2, 753.1),
    "BeamRider": (363.9, 16926.5),
    "Breakout": (1.7, 30.5),
    "CrazyClimber": (10780.5, 35829.4),
    "DemonAttack": (152.1, 1971.0),
    "KungFuMaster": (258.5, 22736.3),
    "MsPacman": (307.3, 6951.6),
    "Pong": (-20.7, 14.6),
    "Qbert": (163.9, 13455.0),
    "SpaceInvaders": (148.0, 1668.7),
}
Curves = dict[str, tuple[np.ndarray, np.ndarray]]  # {tag: (steps, values)} of one run
Study = dict[tuple[str, str], list[Curves]]  # {(variant, env): a run for each seed}


@dataclasses.dataclass(frozen=True)
class Args:
    folder: tyro.conf.Positional[Path | None] = None  # of a study's runs, of which the CSV file is written
    only: str | None = None  # name of the figure to draw, in place of all


# ---- From runs to CSV files ------------------------------------------------------------------------------------------
def read_events(folder: Path) -> Curves:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, curves = EventAccumulator(str(folder), size_guidance={"tensors": 0}).Reload(), {}
    for tag in events.Tags()["tensors"]:
        points = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(tag)]
        curves[tag] = np.array([step for step, _ in points]), np.array([value for _, value in points])
    return curves


def thin(steps: np.ndarray, values: np.ndarray, total: int, mean: bool) -> tuple[np.ndarray, np.ndarray]:
    """A point at the end of each of N_POINTS equal parts of the run: the mean over the part, or its last value."""
    if len(steps) <= N_POINTS:
        return steps, values
    parts = np.ceil(steps * N_POINTS / total).astype(int)
    ends = [np.flatnonzero(parts == part) for part in np.unique(parts)]
    return np.unique(parts) * total // N_POINTS, np.array([values[i].mean() if mean else values[i[-1]] for i in ends])


def needed(curves: Curves, study: str) -> Curves:
    """The curves of a run that figures are made of."""
    if study == "population":
        names = r"(sparsity/network|losses/cumulated|population/parent)_\d+"
        return {tag: points for tag, points in curves.items() if re.fullmatch(names, tag)}
    losses = [points for tag, points in curves.items() if re.fullmatch(r"losses/cumulated_\d+", tag)]
    if losses:  # of a population that of the network that becomes the target, the lowest
        curves["losses/cumulated"] = losses[0][0], np.min([values for _, values in losses], axis=0)
    tags = next(tag for tag in RETURNS if tag in curves), "sparsity/target", "losses/cumulated"
    return {tag: curves[tag] for tag in tags if tag in curves}


def rows_of(path: Path, study: str, run: tuple[str, ...]) -> list[tuple]:
    """Of the CSV file, for the run in the folder `path`."""
    rows, total = [], json.loads((path / "args.json").read_text())["total_timesteps"]
    for tag, points in needed(read_events(path), study).items():
        if tag != RETURNS[0]:
            points = thin(*points, total, mean=not tag.startswith("sparsity"))
        rows += [(study, *run, tag, step, f"{value:.5g}") for step, value in zip(*points)]
    return rows


def collect(folder: Path) -> str:
    """The finished runs of a sweep go into the file of the study. Runs in it that are not in the folder stay."""
    study = folder.resolve().name
    file, found, others = RESULTS / f"{study}.csv", {}, defaultdict(list)  # {(variant, env, seed): rows}
    for path in folder.glob("*/*/policy.npz"):
        env, _, variant, seed = path.parent.parent.name.split("__")
        if "\nFinished after " in (path.parent.parent / "log").read_text():
            found[variant, env, seed] = rows_of(path.parent, study, (variant, env, seed))
    if not found:
        sys.exit(f"error: there is no finished run of a sweep in {folder}")
    for row in list(csv.reader(file.read_text().splitlines()))[1:] if file.exists() else []:
        if tuple(row[1:4]) not in found:
            others[tuple(row[1:4])].append(row)
    file.parent.mkdir(exist_ok=True)
    runs = {**others, **found}
    with open(file, "w", newline="") as out:
        csv.writer(out, lineterminator="\n").writerows([COLUMNS, *[row for run in sorted(runs) for row in runs[run]]])
    return f"{file}: {len(found)} runs of {folder}, {len(others)} others that were there"


def load_study(*names: str, seeds: Sequence[int] = range(1_000)) -> Study:
    """Of one or more CSV files, as if they were one."""
    points, runs = defaultdict(list), defaultdict(dict)
    for name in names:
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


def normalise(study: Study) -> Study:
    """Returns are 0 for random play and 1 for a human on Atari, in other tasks 1 for the dense network at the end."""
    result = {}
    for (variant, env), runs in study.items():
        low, high = SCORES[env] if env in SCORES else (0.0, final(study["dense", env])[1].mean())
        result[variant, env] = [dict(run) for run in runs]
        for run in result[variant, env]:
            for tag in set(RETURNS) & set(run):
                run[tag] = run[tag][0], (run[tag][1] - low) / (high - low)
    return result


def chance_sparsity(
    total: int, first: int, period: int, max_noise: float = 3.0, max_speed: float = 0.01
) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and the target's sparsity if losses were random numbers: where EauDe's rule leads without a selection."""
    sys.path.insert(0, str(ROOT))
    from eaudedqn_atari import Args, next_sparsity, select_population

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
    """Of seeds, a row for each task. A single seed has no interval, nor have equal ones."""
    low, high = bootstrap_interval(scores, statistic)
    interval = f" ({low:,.{digits}f} to {high:,.{digits}f})" if low < high else ""
    return f"{statistic(np.concatenate(scores)):,.{digits}f}{interval}"


def print_table(title: str, study: Study) -> None:
    """Final returns and sparsities: the mean over seeds and its interval."""
    print(f"\n{title}\n\n| task | variant | seeds | final return | final sparsity |\n|---|---|---|---|---|")
    for variant, env in sorted(study, key=lambda key: (key[1], list(study).index(key))):
        runs = study[variant, env]
        sparsities, returns = final(runs)
        digits = 0 if abs(returns.mean()) > 100 else 1
        columns = with_interval([returns], np.mean, digits), with_interval([sparsities], np.mean, 3)
        print(f"| {env} | {variant} | {len(runs)} | {' | '.join(columns)} |")
    print()


# ---- Parts of figures ------------------------------------------------------------------------------------------------
def new_figure(n_rows: int, n_columns: int, width: float, height: float):
    """Sizes in inches."""
    figure, axes = plt.subplots(n_rows, n_columns, figsize=(width, height), squeeze=False, layout="constrained")
    for panel in axes.ravel():
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.3)
    return figure, axes


def set_labels(panel, x: str, y: str, title: str = "") -> None:
    panel.set(xlabel=x, ylabel=y, title=title)
    if "sparsity" not in x:
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


# ---- Figures ---------------------------------------------------------------------------------------------------------
def draw_small_mujoco():
    study = load_study("small_mujoco")
    print_table("MuJoCo, 100,000 steps", study)
    study = complete(study)
    normalised, envs = normalise(study), sorted({env for _, env in study})
    figure, axes = new_figure(2, len(envs) + 1, 11, 5.4)
    rows = ["| algorithm | IQM of final returns / dense SAC's |", "|---|---|"]
    for variant, (style, name) in ALGORITHMS.items():
        label = name.format("SAC")
        for column, env in enumerate(envs):
            draw_curves(axes[0, column], study[variant, env], RETURNS[0], style, label if column == 0 else None)
            draw_curves(axes[1, column], study[variant, env], "sparsity/target", style)
            set_labels(axes[0, column], "", "return" if column == 0 else "", env)
            set_labels(axes[1, column], "environment steps", "sparsity of the critics" if column == 0 else "")
        tasks = [normalised[variant, env] for env in envs]
        draw_iqm(axes[0, -1], tasks, RETURNS[0], style)
        sparsities, returns = zip(*map(final, tasks))
        beside = [x + 0.05 * (variant == "oracle") for x in sparsities]  # which has those of EauDeSAC
        draw_point(axes[1, -1], beside, returns, iqm, color=style[0], marker=style[2], markerfacecolor="none")
        rows.append(f"| {label} | {with_interval(returns, iqm, 2)} |")
    set_labels(axes[0, -1], "", "", "IQM / dense SAC's end")
    set_labels(axes[1, -1], "final sparsity", "final return (IQM)")
    print(*rows, "", sep="\n")
    draw_chance(axes[1, :-1], 100_000, 5_100, 100)
    for panel in axes[:, :-1].ravel():
        panel.set_xlim(0, 100_000)
    figure.legend(loc="outside upper center", ncols=5)
    return figure


def draw_small_regimes():
    study = load_study("small_mujoco", "small_regimes", seeds=(1, 2))  # those that both have
    study = {key[0]: runs for key, runs in study.items() if key[1] == "HalfCheetah" and key[0] != "oracle"}
    print_table("Regimes, HalfCheetah, 100,000 steps", {(variant, "HalfCheetah"): study[variant] for variant in study})
    figure, ((left, right),) = new_figure(1, 2, 9, 3.8)
    hand_made = ["dense", "polyprune_50", "polyprune_80", "polyprune_90", "polyprune", "polyprune_99"]
    families = {
        "EauDeSAC, with $U_{max}$": (EAUDE, ["eaude_0", "eaude", "eaude_10", "eaude_30"]),
        "PolyPruneSAC": (POLYPRUNE, hand_made),
        "PolyPruneSAC, global": (ORACLE, ["polyprune_global"]),
    }
    for name, (style, variants) in families.items():
        points = [final(study[variant]) for variant in variants]
        means = [(sparsities.mean(), returns.mean()) for sparsities, returns in points]
        left.plot(*zip(*means), color=style[0], linestyle=style[1], marker=style[2], markersize=4, label=name)
        for sparsities, returns in points:
            draw_point(left, [sparsities], [returns], np.mean, color=style[0])
    for variant, noise, line in (("eaude_0", 0, ""), ("eaude", 3, "-"), ("eaude_10", 10, "--"), ("eaude_30", 30, ":")):
        sparsities, returns = final(study[variant])
        point, end = (sparsities.mean(), returns.mean()), (100_000, sparsities.mean())
        beside = 11 if noise in (0, 30) else -10  # the last three end close to each other
        left.annotate(noise, point, (beside, -13), textcoords="offset points", ha="center", color=EAUDE[0])
        if noise:
            draw_curves(right, study[variant], "sparsity/target", (EAUDE[0], line))
            right.annotate(noise, end, (4, 0 if noise == 30 else -6), textcoords="offset points", color=EAUDE[0])
            draw_chance([right], 100_000, 5_100, 100, max_noise=noise, line=line, label=noise == 3)
    set_labels(left, "final sparsity of the critics", "final return")
    set_labels(right, "environment steps", "sparsity of the critics")
    figure.legend(loc="outside upper center", ncols=4)
    return figure


def draw_small_sizes():
    study = load_study("small_mujoco", "small_sizes")
    variants = {"eaude_32": "32-32", "eaude_32_global": "32-32, global", "eaude_32_erk": "32-32, erk"}
    variants |= {"eaude": "256-256", "eaude_512": "512-512"}
    study = {key: runs for key, runs in study.items() if key[0] in variants and key[1] == "HalfCheetah"}
    print_table("Sizes of the critics, HalfCheetah, 100,000 steps", study)
    figure, ((left, right),) = new_figure(1, 2, 9, 3.4)
    styles = ("#0072B2", ":"), ("#56B4E9", "-."), ("#009E73", "--"), EAUDE, ("#882255", (0, (5, 1)))
    for (variant, label), style in zip(variants.items(), styles):
        if (variant, "HalfCheetah") not in study:  # the largest takes two hours a seed
            continue
        draw_curves(left, study[variant, "HalfCheetah"], RETURNS[0], style, label)
        draw_curves(right, study[variant, "HalfCheetah"], "sparsity/target", style)
    set_labels(left, "environment steps", "return")
    set_labels(right, "environment steps", "sparsity of the critics")
    left.legend(title="EauDeSAC, critics")
    return figure


def draw_small_atari():
    study = load_study("small_atari")
    print_table("KungFuMaster, 120,000 steps", study)
    figure, ((left, right),) = new_figure(1, 2, 9, 4.0)
    speeds = {
        "eaude": (EAUDE, "EauDe{}, $S_{{max}}$ = 0.03"),
        "eaude_slow": (("#CC79A7", "-."), "EauDe{}, $S_{{max}}$ = 0.01"),
    }
    for (variant, _), runs in study.items():
        style, name = (ALGORITHMS | speeds)[variant]
        draw_curves(left, [smooth(run, RETURNS[1]) for run in runs], RETURNS[1], style)
        draw_curves(right, runs, "sparsity/target", style, name.format("DQN"))
    for max_speed, line in ((0.03, "-"), (0.01, "--")):
        draw_chance([right], 120_000, 5_000, 1_000, max_speed=max_speed, line=line, label=max_speed == 0.03)
    set_labels(left, "environment steps", "return in training")
    set_labels(right, "environment steps", "sparsity of the target")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def draw_small_offline():
    study, tags = load_study("small_offline"), (RETURNS[0], "sparsity/target", "losses/cumulated")
    print_table("KungFuMaster, offline, 40,000 gradient steps", study)
    figure, (panels,) = new_figure(1, 3, 11, 3.2)
    for (variant, _), runs in study.items():
        style, name = ALGORITHMS[variant]
        for panel, tag in zip(panels, tags):
            draw_curves(panel, runs, tag, style, name.format("CQL"))
    draw_chance(panels[1:2], 40_000, 400, 400)
    for panel, label in zip(panels, ("return", "sparsity of the target", "loss of a target period")):
        set_labels(panel, "gradient steps", label)
    handles = panels[1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside upper center", ncols=4)
    return figure


def draw_paper(name: str, base: str):
    """A study of the paper, with a column for each size or length: IQM over tasks and seeds, as there."""
    study = load_study(name)
    print_table(name, study)
    columns = sorted({variant.partition("_")[2] for variant, _ in study}, reverse=True)  # small first, or short
    figure, axes = new_figure(2, len(columns), 1 + 3.3 * len(columns), 5.4)
    for column, size in enumerate(columns):
        chosen = [(variant, env) for variant, env in study if variant.endswith(f"_{size}")]
        part = {(variant.partition("_")[0], env): study[variant, env] for variant, env in chosen}
        part = normalise(complete(part))
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


CROWN = [(-1, -0.7), (1, -0.7), (1.2, 0.9), (0.5, 0), (0, 1.1), (-0.5, 0), (-1.2, 0.9), (-1, -0.7)]


def draw_population():
    """A line for each network, at the height of its sparsity, from one target update to the next."""
    (runs,) = load_study("population").values()
    (run,) = runs
    steps, n_networks = run["sparsity/network_0"][0], sum(tag.startswith("sparsity/network") for tag in run)
    names = "sparsity/network", "losses/cumulated", "population/parent"
    sparsities, losses, parents = [np.array([run[f"{name}_{k}"][1] for k in range(n_networks)]).T for name in names]
    heights = sparsities + 0.004 * (np.arange(n_networks) - n_networks // 2)  # beside each other if they are equal
    period, best = steps[1] - steps[0], losses.argmin(axis=1)
    figure, ((panel,),) = new_figure(1, 1, 9, 4.4)
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
    return figure


ALGORITHMS = {
    "dense": (DENSE, "dense {}"),
    "eaude": (EAUDE, "EauDe{}"),
    "polyprune": (POLYPRUNE, "PolyPrune{}, 0.95"),
    "oracle": (ORACLE, "PolyPrune{}, oracle"),
}
FIGURES = {
    "population": draw_population,
    "small_mujoco": draw_small_mujoco,
    "small_regimes": draw_small_regimes,
    "small_sizes": draw_small_sizes,
    "small_atari": draw_small_atari,
    "small_offline": draw_small_offline,
    "atari": lambda: draw_paper("atari", "DQN"),
    "atari_lengths": lambda: draw_paper("atari_lengths", "DQN"),
    "atari_offline": lambda: draw_paper("atari_offline", "CQL"),
    "mujoco": lambda: draw_paper("mujoco", "SAC"),
}


def main(args: Args) -> None:
    if args.folder:
        print(collect(args.folder))
        return
    if args.only and args.only not in FIGURES:
        sys.exit(f"error: --only takes one of {', '.join(FIGURES)}")
    for name in [args.only] if args.only else FIGURES:
        try:
            figure = FIGURES[name]()
        except FileNotFoundError as error:
            print(f"{name} is not drawn: there is no {error.filename}")
            continue
        except KeyError as error:
            print(f"{name} is not drawn: there is no finished run of {error}")
            continue
        path = RESULTS / f"{name}.png"
        figure.savefig(path, dpi=150)
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the size
        print(path)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
