"""Figures: from the events of runs to CSV files, and from these alone to statistics, tables and pictures."""

import itertools
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from tensorboard.summary import Writer

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmark"))

import plot  # noqa: E402

# np.random.default_rng(0).gamma(2.0, 0.5, size=(5, 3)) + np.array([0.0, 1.0, 3.0]), five seeds of three tasks
SCORES = np.array(
    [
        [0.917155, 1.990271, 0.053205, 1.12828, 1.563142],
        [2.318849, 1.456615, 1.260075, 1.753088, 1.439643],
        [3.533179, 3.492283, 3.529073, 3.473477, 3.571416],
    ]
)


# ---- Statistics ----
def test_iqm_is_the_mean_without_the_outer_quarters():
    assert plot.iqm(np.array([[7, 1, 1_000], [5, -1_000, 6], [2, 3, 4]])) == pytest.approx(np.mean([2, 3, 4, 5, 6]))
    assert plot.iqm(np.array([[1, 2, 3, 4], [5, 6, 7, 80]])) == 4.5


def test_iqm_and_its_interval_are_those_of_rliable():
    """rliable 1.2.0, get_interval_estimates({"a": SCORES.T}, aggregate_iqm, reps=20000) after np.random.seed(0)."""
    assert plot.iqm(SCORES) == pytest.approx(2.08304928, abs=1e-6)
    assert plot.bootstrap_interval(SCORES) == pytest.approx((1.84238471, 2.30885596), abs=0.02)


def test_seeds_are_drawn_within_each_task():
    """Tasks that differ, whose seeds do not: there is nothing uncertain."""
    scores = np.repeat([[0.0], [1.0], [5.0]], 4, axis=1)
    assert plot.bootstrap_interval(scores) == (plot.iqm(scores), plot.iqm(scores))
    low, high = plot.bootstrap_interval(np.arange(5.0)[None], np.mean)
    assert low == pytest.approx(0.8, abs=0.11)  # 2 -+ 1.96 * sqrt(2 / 5), in steps of 1 / 5
    assert high == pytest.approx(3.2, abs=0.11)


def test_returns_are_normalised_by_human_scores_or_by_the_dense_network():
    """A task without a finished run of each variant is left out before."""
    runs = {("dense", "Pong"): [20.0], ("eaude", "Pong"): [-20.7, 14.6], ("dense", "Ant"): [100.0, 300.0]}
    runs |= {("eaude", "Ant"): [0.0, 300.0], ("eaude", "Hopper"): [1.0]}
    curve, sparsity = "eval/episodic_return", (np.array([1]), np.array([0.5]))
    study = {
        key: [{curve: (np.array([1]), np.array([x])), "sparsity/target": sparsity} for x in returns]
        for key, returns in runs.items()
    }
    normalised = plot.normalise(plot.complete(study))
    scores = {key: plot.final(runs)[1].tolist() for key, runs in normalised.items()}
    assert scores["eaude", "Pong"] == [0, 1]
    assert scores["dense", "Pong"] == pytest.approx([40.7 / 35.3])
    assert scores["dense", "Ant"] == [0.5, 1.5]
    assert scores["eaude", "Ant"] == [0, 1.5]
    assert ("eaude", "Hopper") not in scores
    assert plot.final(normalised["eaude", "Ant"])[0].tolist() == [0.5, 0.5]
    assert plot.final(study["eaude", "Ant"])[1].tolist() == [0, 300]  # the study itself is as it was


def test_games_of_the_studies_have_human_scores():
    for path in (ROOT / "benchmark" / "studies").glob("*atari*.toml"):
        assert set(tomllib.loads(path.read_text())["env_ids"]) <= set(plot.SCORES)


# ---- Files ----
def write_run(folder, name, curves, last_line="Finished after 100 steps"):
    run = folder / name / "run"
    run.mkdir(parents=True)
    (run / "policy.npz").touch()
    (run / "args.json").write_text('{"total_timesteps": 100}')
    (run.parent / "log").write_text(f"on 1 cores\n{last_line}")
    writer = Writer(str(run))
    for tag, points in curves.items():
        for step, value in points:
            writer.add_scalar(tag, value, step)
    writer.close()


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_finished_runs_of_a_study_become_one_small_file(tmp_path, results):
    every_step = [(step, step) for step in range(1, 101)]
    curves = {"eval/episodic_return": [(50, 5.0), (100, 1 / 3)], "charts/episodic_return": every_step}
    curves |= {"sparsity/target": every_step, "losses/alpha": every_step, "sparsity/critic_0/network_1": every_step}
    curves |= {f"losses/cumulated_{k}": [(step, 5 + (step + k) % 2) for step, _ in every_step] for k in range(2)}
    write_run(tmp_path / "study", "Ant__script__dense__1", curves)
    write_run(tmp_path / "study", "Pong__script__offline__1", {"eval/episodic_return": [(100, 7.0)]})
    write_run(tmp_path / "study", "Ant__script__dense__2", {"charts/episodic_return": every_step})
    write_run(tmp_path / "study", "Ant__script__dense__3", curves, "Interrupted after 50 steps")
    write_run(tmp_path / "study", "Ant__script__dense__4", {"eval/episodic_return": every_step})
    plot.collect(tmp_path / "study")
    lines = (results / "study.csv").read_text().splitlines()
    assert lines[:3] == [
        "study,variant,env,seed,tag,step,value",
        "study,dense,Ant,1,eval/episodic_return,50,5",
        "study,dense,Ant,1,eval/episodic_return,100,0.33333",
    ]
    study = plot.load_study("study")
    assert {key: len(runs) for key, runs in study.items()} == {("dense", "Ant"): 3, ("offline", "Pong"): 1}
    runs = study["dense", "Ant"]
    assert set(runs[0]) == {"eval/episodic_return", "sparsity/target", "losses/cumulated"}
    assert set(runs[0]["losses/cumulated"][1]) == {5}  # of the best network at each target update
    steps, values = runs[0]["sparsity/target"]  # the last of each part of the run
    assert steps.tolist() == values.tolist() == list(range(2, 101, 2))
    steps, values = runs[1]["charts/episodic_return"]  # the mean of each part
    assert steps.tolist() == list(range(2, 101, 2))
    assert values.tolist() == [step - 0.5 for step in steps]
    assert plot.final_return(runs[0]) == pytest.approx((5 + 1 / 3) / 2, abs=1e-4)
    assert plot.final_return(runs[1]) == np.mean([step - 0.5 for step in range(92, 101, 2)])
    assert plot.final_return(runs[2]) == 99  # evaluations are not thinned
    assert plot.final_sparsity(runs[0]) == 100


def test_a_run_stays_in_the_file_when_its_folder_is_gone(tmp_path, results):
    """Seeds of one study can be run on several machines, or in several sittings."""
    folder, curve = tmp_path / "study", "eval/episodic_return"
    write_run(folder, "Ant__script__dense__1", {curve: [(100, 1.0)]})
    write_run(folder, "Ant__script__dense__2", {curve: [(100, 2.0)]})
    plot.collect(folder)
    before = (results / "study.csv").read_text()
    assert "2 runs of" in plot.collect(folder)
    assert (results / "study.csv").read_text() == before  # not there twice
    shutil.rmtree(folder)
    write_run(folder, "Ant__script__dense__2", {curve: [(50, 7.0), (100, 8.0)]})
    write_run(folder, "Ant__script__dense__10", {curve: [(100, 3.0)]})
    assert plot.collect(folder).endswith(f"study.csv: 2 runs of {folder}, 1 others that were there")
    runs = plot.load_study("study")["dense", "Ant"]
    assert [run[curve][1].tolist() for run in runs] == [[1], [7, 8], [3]]


def test_returns_in_training_are_drawn_as_means_over_a_tenth_of_the_run():
    run = {"return": (np.array([10, 50, 55, 95, 100]), np.array([1.0, 2.0, 4.0, 6.0, 8.0])), "other": None}
    assert plot.smooth(run, "return")["return"][1].tolist() == [1, 2, 3, 6, 7]
    assert run["return"][1].tolist() == [1, 2, 4, 6, 8]  # the run itself is as it was


def test_chance_is_the_rule_of_the_scripts_without_a_selection():
    """More noise leads further, but never further than 1 % of the weights at each pruning."""
    steps, sparsities = plot.chance_sparsity(1_000, 30, 10)
    assert steps[[0, 1, -1]].tolist() == [30, 40, 1_000]
    assert sparsities[0] == 0
    assert (np.diff(sparsities) > -0.01).all()
    assert sparsities[-1] < 1 - 0.99**98
    assert plot.chance_sparsity(1_000, 30, 10, max_noise=0)[1].max() == 0
    assert sparsities[-1] < plot.chance_sparsity(1_000, 30, 10, max_noise=30)[1][-1] < 1 - 0.99**98
    assert sparsities[-1] > 1 - 0.999**98 > plot.chance_sparsity(1_000, 30, 10, max_speed=0.001)[1][-1]


def test_a_folder_without_finished_runs_is_said(tmp_path, results):
    with pytest.raises(SystemExit, match="there is no finished run of a sweep in"):
        plot.main(plot.Args(tmp_path))
    with pytest.raises(SystemExit, match="--only takes one of population, small_mujoco, small_regimes"):
        plot.main(plot.Args(only="nothing"))


# ---- Figures ----
STUDIES = {
    "small_mujoco": ("HalfCheetah Hopper Walker2d", "dense eaude polyprune oracle"),
    "small_regimes": (
        "HalfCheetah",
        "eaude_0 eaude_10 eaude_30 polyprune_50 polyprune_80 polyprune_90 polyprune_99 polyprune_global",
    ),
    "small_sizes": ("HalfCheetah", "eaude_32 eaude_32_global eaude_32_erk eaude_512"),
    "small_atari": ("Pong", "dense eaude eaude_slow polyprune"),
    "small_offline": ("Pong", "dense eaude polyprune"),
    "atari": ("Pong Breakout", "dense_small eaude_small polyprune_small dense_large eaude_large polyprune_large"),
    "atari_lengths": ("Pong", "dense_short eaude_short polyprune_short"),
    "atari_offline": ("Pong", "dense_small eaude_small polyprune_small"),
    "mujoco": ("Ant Humanoid", "dense_small eaude_small polyprune_small oracle_small"),
}


def write_study(results, name, unfinished):
    """A return of 100 from the dense network in each task, of 90 from others; two seeds, of some runs one or three."""
    envs, variants = (text.split() for text in STUDIES[name])
    returns = "charts/episodic_return" if name in ("small_atari", "atari", "atari_lengths") else "eval/episodic_return"
    with open(results / f"{name}.csv", "w") as file:
        print(*plot.COLUMNS, sep=",", file=file)
        for env, variant, seed in itertools.product(envs, variants, (1, 2, 3) if name == "small_mujoco" else (1, 2)):
            for tag, step in itertools.product([returns, "sparsity/target", "losses/cumulated"], (50_000, 100_000)):
                value = {returns: 100 if "dense" in variant else 90}.get(tag, 0.5)
                if (env, variant, seed) not in unfinished:
                    print(name, variant, env, seed, tag, step, value, sep=",", file=file)


def test_figures_of_studies_that_are_not_finished(results, capsys, monkeypatch):
    monkeypatch.setattr(plot, "N_RESAMPLES", 20)
    results.mkdir()
    plot.main(plot.Args())
    assert capsys.readouterr().out.count("is not drawn: there is no ") == len(plot.FIGURES)
    unfinished = {("Walker2d", "oracle", seed) for seed in (1, 2, 3)}  # a task that some have not played
    unfinished |= {("HalfCheetah", "eaude", seed) for seed in (2, 3)}
    unfinished |= {("HalfCheetah", "polyprune_99", 2), ("Pong", "eaude", 2)}
    for name in STUDIES:
        write_study(results, name, unfinished)
    plot.main(plot.Args())
    assert {path.stem for path in results.glob("*.png")} == set(plot.FIGURES) - {"population"}
    output = capsys.readouterr().out
    assert "| HalfCheetah | eaude | 1 | 90.0 | 0.500 |" in output
    mujoco, _, regimes = output.partition("Regimes, HalfCheetah")
    assert "| HalfCheetah | dense | 3 | 100.0 | 0.500 |" in mujoco  # equal seeds have no interval
    assert "| HalfCheetah | dense | 2 | 100.0 | 0.500 |" in regimes  # where others have two, a third is not compared
    assert "| EauDeSAC | 0.90 |" in output  # of HalfCheetah and Hopper
    labels = [line.get_label() for line in plot.FIGURES["small_sizes"]().axes[0].lines]
    assert labels == ["32-32", "32-32, global", "32-32, erk", "256-256", "512-512"]
    ends = [line.get_ydata()[-1] for line in plot.FIGURES["mujoco"]().axes[0].lines]
    assert ends == pytest.approx([1, 0.9, 0.9, 0.9])  # dense, then the others
    small, large, *_ = plot.FIGURES["atari"]().axes
    human = [(100 + 20.7) / 35.3, (100 - 1.7) / 28.8]  # of Pong and Breakout
    for panel, title in ((small, "small, 2 tasks"), (large, "large, 2 tasks")):
        assert panel.get_title() == title
        assert panel.lines[0].get_ydata()[-1] == pytest.approx(np.mean(human))


def test_figures_without_a_variant_or_a_task_are_left_out(results, capsys):
    results.mkdir()
    write_study(
        results,
        "small_mujoco",
        {(env, "oracle", seed) for env in ("HalfCheetah", "Hopper", "Walker2d") for seed in (1, 2, 3)},
    )
    write_study(results, "small_atari", {("Pong", "dense", 1), ("Pong", "dense", 2)})
    write_study(
        results,
        "mujoco",
        {("Ant", "dense_small", seed) for seed in (1, 2)} | {("Humanoid", "eaude_small", seed) for seed in (1, 2)},
    )
    plot.main(plot.Args())
    output = capsys.readouterr().out
    assert "small_mujoco is not drawn: there is no finished run of ('oracle', 'HalfCheetah')" in output
    assert "\nmujoco is not drawn: there is no finished run of 'every variant in one task'" in output
    assert [path.stem for path in results.glob("*.png")] == ["small_atari"]


# ---- What is in git ----
def test_all_figures_and_tables_can_be_made_again_from_the_files_in_git(results, capsys):
    shutil.copytree(ROOT / "benchmark" / "results", results)
    in_git = {path.stem for path in results.glob("*.png")}
    for path in results.glob("*.png"):
        path.unlink()
    readme = (results / "README.md").read_text()
    for name in plot.FIGURES:
        plot.main(plot.Args(only=name))
        table = capsys.readouterr().out.rpartition("\n" + str(results))[0].strip()
        assert name == "population" or (name not in in_git) or (table and table in readme)
    assert {path.stem for path in results.glob("*.png")} == in_git
    for name in in_git:
        assert 10_000 < (results / f"{name}.png").stat().st_size < 200_000
        assert f"({name}.png)" in readme
        assert f"python benchmark/plot.py --only {name}`" in readme
