"""Figures: from the events of runs to CSV files, and from these alone to statistics, tables and pictures."""

import contextlib
import itertools
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

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


def made_up(returns):
    """A study of runs with one evaluation each: {(variant, env): its returns}"""
    sparsity = np.array([1]), np.array([0.5])
    return {
        key: [{"eval/episodic_return": (np.array([1]), np.array([x])), "sparsity/target": sparsity} for x in values]
        for key, values in returns.items()
    }


def test_returns_are_normalised_by_human_scores_or_by_the_dense_network():
    """SpaceInvaders is a game of Atari and one of MinAtar. A task without a run of each variant is left out before."""
    returns = {("dense", "SpaceInvaders"): [100.0, 300.0], ("eaude", "SpaceInvaders"): [148.0, 1668.7]}
    study = plot.complete(made_up(returns | {("eaude", "Pong"): [1.0]}))
    scores = {key: plot.final(runs)[1].tolist() for key, runs in plot.normalise(study).items()}
    assert scores["dense", "SpaceInvaders"] == [0.5, 1.5]
    assert scores["eaude", "SpaceInvaders"] == pytest.approx([0.74, 8.3435])
    assert ("eaude", "Pong") not in scores
    human = plot.normalise(study, plot.SCORES)
    assert plot.final(human["eaude", "SpaceInvaders"])[1].tolist() == [0, 1]
    assert plot.final(human["eaude", "SpaceInvaders"])[0].tolist() == [0.5, 0.5]
    assert plot.final(study["eaude", "SpaceInvaders"])[1].tolist() == [148, 1668.7]  # the study itself is as it was


def test_an_iqm_is_that_of_all_runs_and_not_of_means_of_tasks(capsys):
    study = made_up({("eaude", "Ant"): [0.0], ("eaude", "Hopper"): [1.0, 1.0, 7.0], ("dense", "Ant"): [5.0]})
    plot.print_iqms(study, {"eaude": (plot.EAUDE, "EauDeSAC")}, "SAC")
    # Of 0, 1, 1 and 7; the means of the tasks are 0 and 3. What a single seed says of a task has no interval.
    assert "| EauDeSAC | 1.00 | 0.50 | 4 |" in capsys.readouterr().out
    plot.print_iqms({**study, ("eaude", "Ant"): 2 * study["eaude", "Ant"]}, {"eaude": (plot.EAUDE, "EauDeSAC")}, "SAC")
    assert "| EauDeSAC | 0.67 (" in capsys.readouterr().out
    _, axes = plot.new_figure(1, 1, 3, 3)
    plot.draw_iqm(axes[0, 0], [study["eaude", "Ant"], study["eaude", "Hopper"]], "eval/episodic_return", plot.EAUDE)
    assert axes[0, 0].lines[0].get_ydata().tolist() == [1]
    shade = axes[0, 0].collections[0].get_paths()[0].vertices[:, 1]
    assert (shade.min(), shade.max()) == plot.bootstrap_interval([np.array([0.0]), np.array([1.0, 1.0, 7.0])])


def test_a_curve_is_the_mean_of_seeds_and_its_shade_goes_from_the_lowest_to_the_highest():
    runs = [{"x": (np.array([0, 10]), np.array([0, 10]))}, {"x": (np.array([0, 5, 10]), np.array([2, 2, 4]))}]
    _, ((panel,),) = plot.new_figure(1, 1, 3, 3)
    plot.draw_curves(panel, runs, "x", plot.EAUDE)
    assert panel.lines[0].get_xydata().tolist() == [[0, 1], [5, 3.5], [10, 7]]
    corners = {tuple(x) for x in panel.collections[0].get_paths()[0].vertices.tolist()}
    assert corners == {(0, 0), (0, 2), (5, 2), (5, 5), (10, 4), (10, 10)}


def test_error_bars_go_from_one_end_of_the_interval_to_the_other(monkeypatch):
    monkeypatch.setattr(plot, "bootstrap_interval", lambda *_: (1, 9))
    _, ((panel,),) = plot.new_figure(1, 1, 3, 3)
    plot.draw_point(panel, [np.array([2, 4])], [np.array([5])], np.mean)
    bars = [x.get_segments()[0].tolist() for x in panel.collections]
    assert sorted(bars) == [[[1, 5], [9, 5]], [[3, 1], [3, 9]]]


def test_a_table_has_the_means_of_all_seeds(capsys):
    study = made_up({("eaude", "Asterix"): [1.0, 2.0, 6.0]})
    for run, frozen in zip(study["eaude", "Asterix"], (8.0, 6.0)):
        run[plot.FROZEN] = np.array([1, 2]), np.array([frozen, frozen + 2])
    plot.print_table("Study", study)
    row = capsys.readouterr().out.strip().splitlines()[-1]
    assert re.sub(r" \(.*?\)", "", row) == "| Asterix | eaude | 3 | 3.0 | 8.0 | 0.500 |"


def test_games_of_the_studies_have_human_scores():
    paths = [path for path in (ROOT / "benchmark" / "studies").glob("*atari*.toml") if "minatar" not in path.stem]
    assert len(paths) > 4
    for path in paths:
        assert set(tomllib.loads(path.read_text())["env_ids"]) <= set(plot.SCORES)


# ---- Files ----
def write_run(folder, name, curves, step=100):
    run = folder / name / "run"
    run.mkdir(parents=True)
    np.savez(run / "policy.npz", about=json.dumps({"step": step, "args": {"total_timesteps": 100}}))
    (run / "args.json").write_text('{"total_timesteps": 100}')
    writer = EventFileWriter(str(run))
    for tag, points in curves.items():
        for step, value in points:
            writer.add_event(Event(step=step, summary=Summary(value=[Summary.Value(tag=tag, simple_value=value)])))
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
    write_run(tmp_path / "study", "Ant__script__dense__3", curves, step=50)
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


def test_the_policy_of_a_run_of_minatar_is_played(tmp_path, results, capsys):
    curves = {"charts/episodic_return": [(100, 7.0)], "sparsity/target": [(100, 0.5)]}
    write_run(tmp_path / "study", "Breakout__eaudedqn_minatar__eaude__2", curves)
    policy = tmp_path / "study" / "Breakout__eaudedqn_minatar__eaude__2" / "run" / "policy.npz"
    shutil.copy(ROOT / "policies" / "minatar_breakout.npz", policy)
    plot.collect(tmp_path / "study")
    study = plot.load_study("study")
    episodes, returns = study["eaude", "Breakout"][0]["frozen/episodic_return"]
    assert episodes.tolist() == list(range(1, 31))
    assert returns[:10].tolist() == [9, 2, 28, 8, 11, 27, 1, 6, 23, 9]  # as the README shows
    plot.print_table("Study", study)
    assert f"| Breakout | eaude | 1 | 7.0 | {returns.mean():.1f} | 0.500 |" in capsys.readouterr().out


POPULATION = {  # of three networks, at three target updates
    "sparsity/network": [(0, 0, 0), (0, 0.1, 0.05), (0.1, 0.28, 0.145)],
    "losses/cumulated": [(3, 1, 2), (4, 5, 2), (6, 3, 4)],
    "population/parent": [(0, 0, 2), (0, 1, 2), (1, 1, 2)],
}


def test_a_copy_is_compared_with_its_parent_at_the_next_update(tmp_path, results):
    """At step 10 network 1 becomes a copy of 0, a tenth of which is pruned: at 20 its loss is 5, and 4 that of 0."""
    curves = {
        f"{name}_{k}": [(10 * (i + 1), row[k]) for i, row in enumerate(rows)]
        for (name, rows), k in itertools.product(POPULATION.items(), range(3))
    }
    curves |= {"charts/episodic_return": [(100, 7.0)]}
    for name in ("Breakout__script__eaude__1", "Breakout__script__eaude__2", "Asterix__script__eaude__1"):
        write_run(tmp_path / "minatar", name, curves)
    plot.collect(tmp_path / "minatar")
    study = plot.load_study("minatar")
    first, second = study["eaude", "Breakout"]
    assert [first[tag][0].tolist() for tag in plot.TOURNAMENTS] == [[20], [20]]
    assert first["tournament/pruned"][1].tolist() == pytest.approx([0.1])
    assert first["tournament/loss"][1].tolist() == pytest.approx([0.25])
    assert set(second) == set(study["eaude", "Asterix"][0]) == {"charts/episodic_return"}  # the file stays small


def test_a_copy_of_a_sparse_parent_loses_a_share_of_what_is_left():
    """Network 0 becomes a copy of 1, whose sparsity is 0.1, and has 0.28: a fifth of the weights that were left."""
    curves = {
        f"{name}_{k}": (np.arange(3), np.array([row[k] for row in rows]))
        for (name, rows), k in itertools.product(
            {
                "sparsity/network": [(0, 0.1), (0.28, 0.1), (0.28, 0.1)],
                "losses/cumulated": [(3, 1), (1, 2), (1, 2)],
                "population/parent": [(1, 1), (0, 1), (0, 0)],
            }.items(),
            range(2),
        )
    }
    (steps, pruned), (_, losses) = [plot.tournaments(curves)[tag] for tag in plot.TOURNAMENTS]
    assert steps.tolist() == [1]  # the copies of the last update are compared with nobody
    assert pruned.tolist() == pytest.approx([0.2])
    assert losses.tolist() == [-0.5]


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


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"folder": Path("no/such/folder")}, "error: there is no finished run of a sweep in no/such/folder\n"),
        ({"only": "nothing"}, "error: --only takes one of baselines, minatar, minatar_sparsity, "),
    ],
)
def test_a_mistake_gets_one_line_and_exit_code_2(flags, message, capsys, results):
    with pytest.raises(SystemExit) as end:
        plot.main(plot.Args(**flags))
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1


# ---- Figures ----
PAPER = {
    "baselines": ("Breakout", "sb3"),
    "atari": ("Pong Boxing", "dense_small eaude_small polyprune_small dense_large eaude_large polyprune_large"),
    "atari_lengths": ("Pong", "dense_short eaude_short polyprune_short"),
    "atari_offline": ("Pong", "dense_small eaude_small polyprune_small"),
    "mujoco": ("Ant Humanoid", "dense_small eaude_small polyprune_small oracle_small"),
}
OFFLINE_OR_SAC = "mujoco", "offline", "regimes", "sizes"


def write_study(results, name, without=()):
    """The study in git, shorter: returns of dense networks are 100, of others 80 and, seed 2 and further, 90."""
    envs, variants = (text.split() for text in PAPER.get(name, ("", "")))
    if not envs:
        study = tomllib.loads((ROOT / "benchmark" / "studies" / f"{name}.toml").read_text())
        envs, variants = study["env_ids"], list(study["variants"])
    evaluates = name.endswith(OFFLINE_OR_SAC) or "mujoco" in name
    returns = plot.RETURNS[0 if evaluates and "minatar" not in name else 1]
    with open(results / f"{name}.csv", "w") as file:
        print(*plot.COLUMNS, sep=",", file=file)
        for env, variant, seed in itertools.product(envs, variants, (1, 2, 3)):
            value = {returns: 100 if "dense" in variant else 80 if seed == 1 else 90}
            for tag, step in itertools.product([returns, "sparsity/target", "losses/cumulated"], (50_000, 100_000)):
                if (env, variant, seed) not in without and (env, variant) not in without:
                    print(name, variant, env, seed, tag, step, value.get(tag, 0.5), sep=",", file=file)
            if (variant, env, str(seed)) in plot.SEEN_TOURNAMENTS:
                for tag, step in itertools.product(plot.TOURNAMENTS, (10_000, 90_000, 100_000)):
                    print(name, variant, env, seed, tag, step, 0.003, sep=",", file=file)


@pytest.fixture
def quick(results, monkeypatch):
    monkeypatch.setattr(plot, "N_RESAMPLES", 20)
    monkeypatch.setattr(plot, "chance_sparsity", lambda *_, **__: (np.array([0, 100_000]), np.array([0, 0.9])))
    results.mkdir()
    return results


def ends(panel):
    return [line.get_ydata()[-1] for line in panel.lines]


def test_all_figures_of_finished_studies_are_drawn(quick, capsys):
    plot.main(plot.Args())
    assert capsys.readouterr().out.count("is not drawn: there is no ") == len(plot.FIGURES)
    names = [path.stem for path in (ROOT / "benchmark" / "studies").glob("*.toml")]
    for name in [x for x in names if x.startswith(("minatar", "small")) or x in PAPER]:
        write_study(quick, name)
    write_study(quick, "baselines")
    plot.main(plot.Args())
    assert {path.stem for path in quick.glob("*.png")} == set(plot.FIGURES) - {"population"}
    assert "is not drawn" not in capsys.readouterr().out.replace("population is not drawn", "")


def test_figures_of_minatar_show_what_the_files_have(quick, capsys):
    for name in ("minatar", "minatar_small", "minatar_ladder", "minatar_distributions"):
        write_study(quick, name, [("Asterix", "oracle"), ("Breakout", "eaude", 2), ("SpaceInvaders", "selection", 2)])
    *games, iqm = plot.FIGURES["minatar"]().axes
    assert [panel.get_title() for panel in games] == ["Asterix", "Breakout", "Freeway", "Seaquest", "SpaceInvaders"]
    assert ends(games[0]) == pytest.approx([100, 260 / 3, 260 / 3])
    assert ends(games[1]) == pytest.approx([100, 85, 260 / 3])  # no oracle, as one game has none
    assert ends(iqm) == pytest.approx([1, 7 / 8, 7.9 / 9])  # 5 runs of 80, 9 or 10 of 90: without 3 at either end
    assert "| EauDeDQN | 0.8" in capsys.readouterr().out
    left, _ = plot.FIGURES["minatar_sparsity"]().axes
    labels = [line.get_label() for line in left.lines]
    sizes = ["EauDeDQN, 32 hidden units", "EauDeDQN, 128 hidden units"]
    assert labels == [*sizes, "PolyPruneDQN", "EauDe, random losses"]
    output = capsys.readouterr().out
    assert "| Breakout | 128 | 2 | 0.500 |" in output
    assert "If losses were random, EauDe with S_max = 0.04 would end at a sparsity of 0.90." in output
    breakout, space_invaders = plot.FIGURES["minatar_ladder"]().axes
    widths = [[bar.get_width() for bar in panel.patches] for panel in (breakout, space_invaders)]
    mean = pytest.approx(260 / 3)
    assert widths[0] == [100, mean, mean, 85, mean, mean]  # dense, single, selection, eaude, oracle, polyprune
    assert widths[1] == [100, mean, 85, mean, mean, mean]
    figure = plot.FIGURES["minatar_tournaments"]()
    assert [panel.get_title() for panel in figure.axes] == ["erk", "global", "uniform"]


def test_dense_agents_are_held_against_as_many_seeds_of_other_libraries(quick, capsys):
    write_study(quick, "minatar")
    write_study(quick, "baselines", without=[("Breakout", "sb3", 3)])
    (panel,) = plot.FIGURES["baselines"]().axes
    assert ends(panel) == pytest.approx([100, 85])
    assert panel.get_title() == "Breakout, Stable-Baselines3"
    output = capsys.readouterr().out
    assert "| Breakout | ours | 2 | 100.0 |\n| Breakout | Stable-Baselines3 | 2 | 85.0 (80.0 to 90.0) |" in output


def test_seeds_that_others_do_not_have_are_not_compared(quick, capsys):
    write_study(quick, "small_mujoco")
    write_study(quick, "small_regimes", without=[("HalfCheetah", "polyprune_99", 2)])
    plot.FIGURES["small_regimes"]()
    output = capsys.readouterr().out
    assert "| HalfCheetah | dense | 2 | 100.0 | 0.500 |" in output  # equal seeds have no interval
    assert "| HalfCheetah | polyprune_99 | 1 | 80.0 | 0.500 |" in output


def test_tasks_without_a_variant_are_left_out_of_an_iqm(quick, capsys):
    write_study(quick, "small_mujoco", without=[("Walker2d", "oracle")])
    titles = [panel.get_title() for panel in plot.FIGURES["small_mujoco"]().axes]
    assert titles[:4] == ["HalfCheetah", "Hopper", "IQM / dense SAC's end", ""]
    assert "| EauDeSAC | 0.88 (" in capsys.readouterr().out  # of 80, 90, 90 twice
    write_study(quick, "mujoco", without=[("Ant", "dense_small"), ("Humanoid", "eaude_small")])
    with pytest.raises(SystemExit) as exit_info:
        plot.main(plot.Args(only="mujoco"))
    assert exit_info.value.code == 2
    assert "mujoco is not drawn: there is no finished run of 'every variant in one task'" in capsys.readouterr().err


def test_studies_of_the_paper_are_drawn_as_iqms(quick):
    for name in PAPER:
        write_study(quick, name)
    assert ends(plot.FIGURES["mujoco"]().axes[0])[0] == pytest.approx(1)
    small, large, *_ = plot.FIGURES["atari"]().axes
    human = [(100 + 20.7) / 35.3, (100 - 0.1) / 12]  # of Pong and Boxing
    for panel, title in ((small, "small, 2 tasks"), (large, "large, 2 tasks")):
        assert panel.get_title() == title
        assert ends(panel)[0] == pytest.approx(np.mean(human))


def test_a_crown_is_the_next_target_and_a_star_wins_a_tournament():
    plot.draw_tournament(np.array([5, 1, 4.0]), [np.array([0, 2]), np.array([1, 2])], np.array([1, 1, 2]))
    (panel,) = plot.plt.gcf().axes
    marks = [(line.get_marker(), *line.get_xdata(), *line.get_ydata()) for line in panel.lines]
    assert [mark for mark in marks if mark[0] in ("*", plot.CROWN)] == [(plot.CROWN, 1, 0), ("*", 2, 1), ("*", 1, 2)]
    assert [text.get_text() for text in panel.texts] == ["1", "copy of 1", "1", "1 stays", "2", "2 stays"]


def test_what_is_kept_has_a_colour_and_what_is_pruned_is_white():
    plot.draw_masks({"whole": np.ones((4, 2)), "half": np.eye(4, 2), "empty": np.zeros((4, 2))})
    colours = [panel.images[0].to_rgba(panel.images[0].get_array()) for panel in plot.plt.gcf().axes]
    whole, half, empty = (set(map(tuple, x.reshape(-1, 4)[:, :3])) for x in colours)
    assert empty == {(1, 1, 1)}
    assert whole == {plot.matplotlib.colors.to_rgb(plot.EAUDE[0])}
    assert half == whole | empty


@pytest.mark.parametrize("scale", [1, 0.01])
def test_a_copy_is_drawn_above_its_parent_and_a_fall_of_the_target_as_a_fall(scale):
    """However small the prunings are: networks beside each other shall not look like prunings."""
    sparsities = scale * np.array([[0.2, 0.2, 0.5, 0.2, 0.2], [0.52, 0.2, 0.5, 0.22, 0.2]])
    losses, parents = np.array([[2, 2, 1, 2, 2], [2, 2, 2, 1, 2.0]]), np.array([[2, 1, 2, 4, 4], [3, 1, 2, 3, 4]])
    _, ((panel,),) = plot.new_figure(1, 1, 4, 3)
    plot.draw_tree(panel, np.array([100, 200]), sparsities, losses, parents)
    branches = [line.get_ydata() for line in panel.lines if len(line.get_xdata()) == 3][5:]  # of the second update
    rises = [end - start for start, end, _ in branches]
    assert rises[0] > 0  # copies are pruned by a sixteenth of the range of sparsities
    assert rises[3] > 0
    assert rises[1] == rises[2] == rises[4] == 0
    crowns = [line.get_ydata()[0] for line in panel.lines if line.get_marker() == plot.CROWN]
    assert crowns[0] > crowns[1]


def test_networks_of_one_sparsity_are_drawn_beside_each_other():
    _, ((panel,),) = plot.new_figure(1, 1, 4, 3)
    plot.draw_tree(panel, np.array([100, 200]), np.zeros((2, 3)), np.ones((2, 3)), np.tile(np.arange(3), (2, 1)))
    assert len({tuple(line.get_ydata()) for line in panel.lines if len(line.get_xdata()) == 3}) == 3


# ---- What is in git ----
def test_all_figures_and_tables_can_be_made_again_from_the_files_in_git(results, capsys):
    shutil.copytree(ROOT / "benchmark" / "results", results)
    in_git = {path.stem for path in results.glob("*.png")}
    for path in results.glob("*.png"):
        path.unlink()
    readme = (results / "README.md").read_text()
    for name in plot.FIGURES:
        with contextlib.suppress(SystemExit):  # a study without a file
            plot.main(plot.Args(only=name))
        table = capsys.readouterr().out.rpartition("\n" + str(results))[0].strip()
        assert name == "population" or (name not in in_git) or (table and table in readme)
    assert {path.stem for path in results.glob("*.png")} == in_git
    for name in in_git:
        assert 10_000 < (results / f"{name}.png").stat().st_size < 200_000
        assert f"({name}.png)" in readme
        assert f"python benchmark/plot.py --only {name}`" in readme
