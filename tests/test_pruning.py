"""Masks, sparsity, Eq. (3), tournaments and behaviour probabilities: the functions other people copy."""

import itertools
import math

import numpy as np
import pytest

from eaudedqn_atari import (
    magnitude_masks,
    network_probabilities,
    next_sparsity,
    select_population,
    sparsity_of,
    tensor_densities,
)

ATARI_SHAPES = [(8, 8, 4, 32), (4, 4, 32, 64), (3, 3, 64, 64), (7744, 512), (512, 6)]


def random_params(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"conv": {"kernel": (3, 3, 4, 8), "bias": (8,)}, "dense": {"kernel": (40, 7), "bias": (7,)}}
    return {layer: {name: rng.normal(size=s) for name, s in tensors.items()} for layer, tensors in shapes.items()}


@pytest.mark.parametrize(
    ("weights", "sparsity", "kept"),
    [
        ([[3, -1], [2, -4]], 0.0, [[1, 1], [1, 1]]),
        ([[3, -1], [2, -4]], 0.25, [[1, 0], [1, 1]]),
        ([[3, -1], [2, -4]], 0.5, [[1, 0], [0, 1]]),
        ([[3, -1], [2, -4]], 0.75, [[0, 0], [0, 1]]),
        ([[3, -1], [2, -4]], 0.99, [[0, 0], [0, 1]]),  # at least one weight stays
        ([[3, -1], [2, -4]], 0.3, [[1, 0], [1, 1]]),  # 2.8 weights are 3
        ([[3, -1], [2, -4]], 0.4, [[1, 0], [0, 1]]),  # 2.4 weights are 2
        ([[1, -1], [1, 1]], 0.5, [[1, 1], [0, 0]]),  # of equal magnitudes the first stay
        ([[2, -2], [5, 2]], 0.5, [[1, 0], [1, 0]]),
        ([[1, 2, -2, 2, 0]], 0.6, [[0, 1, 1, 0, 0]]),
        ([[0, 0], [0, 0]], 0.25, [[1, 1], [1, 0]]),
        ([[0, 7], [0, 0]], 0.5, [[1, 1], [0, 0]]),
    ],
)
@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])  # alike if there is only one tensor
def test_masks_keep_the_largest_magnitudes(weights, sparsity, kept, distribution):
    masks = magnitude_masks({"kernel": np.array(weights, np.float32)}, sparsity, distribution)
    assert masks["kernel"].dtype == bool
    np.testing.assert_array_equal(masks["kernel"], np.array(kept, bool))


def test_biases_are_never_pruned_and_do_not_count():
    masks = magnitude_masks(random_params(), 0.9, "uniform")
    assert masks["conv"]["bias"].all()
    assert masks["dense"]["bias"].all()
    assert (masks["conv"]["kernel"].sum(), masks["dense"]["kernel"].sum()) == (29, 28)  # of 288 and 280
    assert sparsity_of(masks) == pytest.approx(1 - (29 + 28) / 568)


def test_uniform_prunes_every_tensor_alike():
    masks = magnitude_masks(random_params(), 0.5, "uniform")
    assert (masks["conv"]["kernel"].sum(), masks["dense"]["kernel"].sum()) == (144, 140)


def test_erk_by_hand():
    # sum(shape) / prod(shape) is 1 and 0.2; 52 of 104 weights stay. 52 / 24 > 1: the small one is dense, 48 are left.
    params = {"small": np.random.default_rng(0).normal(size=(2, 2)), "large": np.arange(100.0).reshape(10, 10)}
    masks = magnitude_masks(params, 0.5, "erk")
    assert (masks["small"].sum(), masks["large"].sum()) == (4, 48)


@pytest.mark.parametrize(
    ("first", "second", "sparsity", "kept", "also_kept"),
    [
        ([[3, -1], [2, -4]], [[5, 0.5]], 0.5, [[1, 0], [0, 1]], [[1, 0]]),  # 3, 4 and 5
        ([[9, -8], [7, 6]], [[5, 5]], 1 / 3, [[1, 1], [1, 1]], [[1, 0]]),  # 4 weights, all of them of the first
        ([[9, -8], [7, 6]], [[1, 2]], 5 / 6, [[1, 0], [0, 0]], [[0, 1]]),  # at least one weight of each tensor stays
        ([[1, 2], [2, 0]], [[2, 2]], 0.5, [[0, 1], [1, 0]], [[1, 0]]),  # of equal magnitudes the first of all stay
        ([[0.1, 0.2], [0.3, 0.4]], [[5, 6]], 0.0, [[1, 1], [1, 1]], [[1, 1]]),
    ],
)
def test_global_is_one_threshold_for_the_whole_network(first, second, sparsity, kept, also_kept):
    params = {"a": np.array(first, np.float32), "bias": np.zeros(3), "c": np.array(second, np.float32)}
    masks = magnitude_masks(params, sparsity, "global")
    np.testing.assert_array_equal(masks["a"], np.array(kept, bool))
    np.testing.assert_array_equal(masks["c"], np.array(also_kept, bool))
    assert masks["bias"].all()


def test_global_keeps_what_sorting_all_weights_keeps():
    params = random_params()
    params["dense"]["kernel"] *= 2
    masks = magnitude_masks(params, 0.9, "global")
    magnitudes = np.concatenate([np.abs(params[layer]["kernel"]).ravel() for layer in ("conv", "dense")])
    kept = np.concatenate([masks[layer]["kernel"].ravel() for layer in ("conv", "dense")])
    assert kept.sum() == 57  # of 568
    assert magnitudes[kept].min() > magnitudes[~kept].max()
    assert masks["dense"]["kernel"].sum() > masks["conv"]["kernel"].sum() > 0


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.9, 0.95, 0.99, 0.999])
def test_erk_densities_are_proportional_capped_and_add_up(sparsity):
    densities = tensor_densities([np.empty(shape) for shape in ATARI_SHAPES], sparsity, "erk")
    sizes = np.array([math.prod(shape) for shape in ATARI_SHAPES])
    scores = np.array([sum(shape) / math.prod(shape) for shape in ATARI_SHAPES])
    assert densities @ sizes / sizes.sum() == pytest.approx(1 - sparsity)
    assert (densities <= 1).all()
    free = densities < 1
    ratios = densities[free] / scores[free]
    np.testing.assert_allclose(ratios, ratios.max(initial=0))
    if free.any():  # a tensor is dense only because its share would exceed 1
        assert (scores[~free] * ratios[0] >= 1).all()


@pytest.mark.parametrize(
    ("sparsity", "distribution", "words"),
    [
        (0.5, "unifrm", "unknown distribution 'unifrm'"),
        (1.0, "erk", "a sparsity is from 0"),
        (-0.1, "global", "a sparsity is from 0"),
        (np.nan, "erk", "a sparsity is from 0"),
    ],
)
def test_masks_that_cannot_be_are_refused(sparsity, distribution, words):
    with pytest.raises(ValueError, match=words):
        magnitude_masks(random_params(), sparsity, distribution)


@pytest.mark.parametrize("distribution", ["uniform", "erk", "global"])
def test_masks_nest_as_sparsity_grows(distribution):
    params = random_params()
    params["dense"]["kernel"] = params["dense"]["kernel"].round(1)  # many ties
    previous = magnitude_masks(params, 0.0, distribution)
    for sparsity in np.linspace(0.02, 0.99, 50):
        masks = magnitude_masks(params, sparsity, distribution)
        for layer, name in itertools.product(("conv", "dense"), ("kernel", "bias")):
            assert not (masks[layer][name] & ~previous[layer][name]).any()
        assert sparsity_of(masks) > sparsity_of(previous)
        previous = masks


def test_sparsity_of_counts_zeros_of_prunable_weights():
    masks = {"a": np.array([[True, False], [False, False]]), "b": np.zeros(100, bool), "c": np.ones((2, 6), bool)}
    assert sparsity_of(masks) == 3 / 16
    assert isinstance(sparsity_of(masks), float)


@pytest.mark.parametrize(
    ("sparsity", "noise", "step", "expected"),
    [
        (0.0, 1.0, 0, 0.1),  # on the line to (t_final, 1)
        (0.0, 0.5, 0, 0.05),
        (0.0, 0.0, 0, 0.0),
        (0.4, 1.0, 500, 0.4 + 0.6 * 100 / 500),
        (0.4, 1.2, 500, 0.4 + 0.6 * 0.24),
        (0.4, 1.3, 500, 0.4 + 0.6 * 0.25),  # the cap
        (0.0, 3.0, 0, 0.25),
        (0.4, 3.0, 900, 0.4 + 0.6 * 0.25),
        (0.4, 0.1, 900, 0.4 + 0.6 * 0.1),
        (0.4, 3.0, 1_000, 0.4 + 0.6 * 0.25),  # the last update: no division by zero
        (0.4, 0.0, 1_000, 0.4),
        (1.0, 3.0, 500, 1.0),
    ],
)
def test_equation_3(sparsity, noise, step, expected):
    assert next_sparsity(sparsity, noise, step, step + 100, 1_000, max_speed=0.25) == pytest.approx(expected)


def test_without_noise_and_cap_equation_3_is_a_straight_line_to_1():
    sparsity = 0.0
    for step in range(0, 1_000, 50):
        assert sparsity == pytest.approx(step / 1_000)
        sparsity = next_sparsity(sparsity, 1.0, step, step + 50, 1_000, max_speed=1.0)
    assert sparsity == pytest.approx(1.0)


def test_default_speed_removes_one_percent_of_what_remains():
    assert next_sparsity(0.9, 3.0, 9_000_000, 9_008_000, 10_000_000, 0.01) == pytest.approx(0.9 + 0.1 * 0.01)


def test_without_a_finite_loss_nobody_is_selected():
    with pytest.raises(ValueError, match="no network has a finite loss"):
        select_population(np.random.default_rng(0), np.full(5, np.inf), 3)


LOSSES = np.array([5.0, 1.0, 4.0, 2.0, 3.0])  # ranks: network 1, 3, 4, 2, 0


def test_best_network_keeps_its_slot_and_so_does_every_selected_one():
    rng = np.random.default_rng(0)
    for _ in range(500):
        parents = select_population(rng, LOSSES, 3)
        assert parents.shape == (5,)
        assert parents[1] == 1
        for parent in parents:
            assert parents[parent] == parent


def test_selections_follow_the_winning_probabilities_of_tournaments():
    # Of 5 networks, 3 are drawn: the best of all is among them with probability 6/10, else the second with 3/10, ...
    rng, n_draws = np.random.default_rng(0), 20_000
    n_selected = np.array([np.bincount(select_population(rng, LOSSES, 3), minlength=5) for _ in range(n_draws)])
    probabilities = np.array([0.0, 0.6, 0.0, 0.3, 0.1])
    expected = 4 * probabilities + np.array([0, 1, 0, 0, 0])
    deviation = np.sqrt(4 * probabilities * (1 - probabilities) / n_draws)
    assert (np.abs(n_selected.mean(axis=0) - expected) <= 4 * deviation).all()
    assert (n_selected[:, 1] == 5).mean() == pytest.approx(0.6**4, abs=0.01)  # the tournaments are independent


def test_copies_fill_each_free_slot_once():
    class Draws:  # a generator whose tournaments are known
        def __init__(self, *draws):
            self.draws = iter(draws)

        def choice(self, networks, size, replace):
            assert list(networks) == [0, 1, 2, 3, 4]
            assert (size, replace) == (3, False)
            return np.array(next(self.draws))

    parents = select_population(Draws((0, 3, 2), (1, 4, 0), (0, 2, 3), (2, 4, 0)), LOSSES, 3)  # won by 3, 1, 3, 4
    assert sorted(parents[[0, 2]]) == [1, 3]  # networks 0 and 2 were not selected, 1 and 3 were selected twice
    np.testing.assert_array_equal(parents[[1, 3, 4]], [1, 3, 4])


def test_tournament_of_all_networks_leaves_only_the_best():
    np.testing.assert_array_equal(select_population(np.random.default_rng(0), LOSSES, 5), np.ones(5))


def test_tournament_of_one_is_a_uniform_draw():
    rng = np.random.default_rng(0)
    n_selected = np.mean([np.bincount(select_population(rng, LOSSES, 1), minlength=5) for _ in range(10_000)], axis=0)
    np.testing.assert_allclose(n_selected, [0.8, 1.8, 0.8, 0.8, 0.8], atol=0.05)


def test_diverged_networks_are_never_selected():
    rng, losses = np.random.default_rng(0), np.array([np.inf, 2.0, np.nan, np.inf, 1.0])
    for _ in range(200):
        parents = select_population(rng, losses, 3)
        assert parents[4] == 4
        assert set(parents) <= {1, 4}


def test_population_of_one():
    np.testing.assert_array_equal(select_population(np.random.default_rng(0), np.array([3.0]), 1), [0])


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([1, 2, 4], [4 / 7, 2 / 7, 1 / 7]),
        ([1e-8, 3e-8], [3 / 4, 1 / 4]),  # no additive constant
        ([0, 0, 0], [1 / 3, 1 / 3, 1 / 3]),
        ([0, 5, 0], [1 / 2, 0, 1 / 2]),
        ([1, np.inf, 1], [1 / 2, 0, 1 / 2]),
        ([3, np.nan, 1], [1 / 4, 0, 3 / 4]),
        ([0, np.inf], [1, 0]),
        ([1e-320, 2e-320], [2 / 3, 1 / 3]),  # 1 / L would be infinite
        ([np.inf, np.nan], [1 / 2, 1 / 2]),
        ([7], [1]),
    ],
)
def test_behaviour_probabilities_are_inverse_to_the_losses(losses, expected):
    np.testing.assert_allclose(network_probabilities(np.array(losses, np.float64)), expected, rtol=1e-3)
