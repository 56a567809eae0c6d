"""Every knob is checked when a recipe is made, and the paper's configurations are those of its table."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unmerge import Recipe
from unmerge.errors import RecipeError
from unmerge.recipe import BASES, SOLVERS

FIELDS = {entry.name: entry for entry in dataclasses.fields(Recipe)}
NUMBERS = [name for name, entry in FIELDS.items() if entry.metadata["rule"] and entry.metadata["rule"].number]
WORDS = [name for name, entry in FIELDS.items() if entry.metadata["rule"] and entry.metadata["rule"].words]

positive = st.floats(0, 1e6, allow_nan=False, allow_infinity=False)
CLOSED = [name for name, basis in BASES.items() if basis.closed]
knobs = st.fixed_dictionaries(
    {},
    optional={
        "basis": st.sampled_from(list(BASES)),
        "solver": st.sampled_from(SOLVERS),
        "rank": st.integers(1, 4096),
        "retain_rank": st.integers(0, 4096),
        "lam": positive,
        "gamma": positive,
        "ridge": positive,
        "alpha": st.none() | positive,
        "max_points": st.none() | st.integers(1, 10**6),
        "skip_layers": st.just("auto") | st.integers(0, 60),
        "layers": st.none() | st.just("re:conv") | st.lists(st.text(min_size=1), min_size=1, max_size=3),
        "mean": st.sampled_from(["auto", "preserve", "free"]),
        "bias": st.sampled_from(["keep", "shrink"]),
        "head": st.sampled_from(["auto", "remove", "edit", "keep"]),
    },
).filter(lambda values: values.get("basis") not in CLOSED or values.get("solver", "exact") == "exact")


@given(knobs)
@settings(max_examples=50, deadline=None)
def test_a_recipe_survives_a_json_file(values):
    recipe = Recipe(**values)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe


@pytest.mark.parametrize("solver", ["budgeted", "soft-threshold"])
@pytest.mark.parametrize("basis", CLOSED)
def test_closed_forms_have_no_other_solver(basis, solver):
    with pytest.raises(RecipeError, match=f"basis='{basis}' is a closed form of its own: use solver='exact'"):
        Recipe(basis=basis, solver=solver)


def test_layers_from_a_generator_are_kept():
    assert Recipe(layers=(name for name in ("a", "b"))).layers == ["a", "b"]


def test_every_field_says_what_it_means():
    assert all(entry.metadata["meaning"] for entry in FIELDS.values())


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1, True, "many", [1]])
def test_a_number_is_finite_not_negative_and_a_number(name, value):
    with pytest.raises(RecipeError, match=f"{name}="):
        Recipe(**{name: value})


@pytest.mark.parametrize("name", WORDS)
def test_an_unknown_word_is_refused_with_those_there_are(name):
    known = FIELDS[name].metadata["rule"].words
    with pytest.raises(RecipeError) as refused:
        Recipe(**{name: "zzz"})
    assert all(repr(word) in str(refused.value) for word in known)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ({"bassis": "lda"}, "'basis'"),
        ({"lambda_": 1.0, "rank": 4}, "'lam'"),
        ({"skip_layer": 3}, "'skip_layers'"),
        ({"basis": "cav-klass"}, "'cav-class'"),
        ({"basis": "PCA"}, "'pca'"),
        ({"solver": "budget"}, "'budgeted'"),
        ({"head": "removed"}, "'remove'"),
        ({"skip_layers": "automatic"}, "'auto'"),
    ],
)
def test_a_typing_error_is_answered_with_the_nearest_name(wrong, near):
    with pytest.raises(RecipeError, match=near):
        Recipe(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [{"rank": 0}, {"rank": 2.5}, {"rank": None}, {"max_points": 0}, {"basis": None}, {"seed": 0.5}, {"steps": -1}],
)
def test_values_out_of_range_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(RecipeError, match=f"{name}="):
        Recipe(**wrong)


@pytest.mark.parametrize("layers", [5, 1.5, ["conv1", 3], True])
def test_layers_that_are_no_names_are_refused_when_the_recipe_is_made(layers):
    with pytest.raises(RecipeError, match="layers"):
        Recipe(layers=layers)


def test_from_dict_and_but_check_like_the_constructor():
    with pytest.raises(RecipeError, match="'rank'"):
        Recipe.from_dict({"rnk": 3})
    with pytest.raises(RecipeError, match="rank="):
        Recipe().but(rank=-3)
    with pytest.raises(RecipeError, match="'gamma'"):
        Recipe().but(gama=0.5)


def test_but_changes_only_what_it_is_told_and_leaves_the_recipe_alone():
    recipe = Recipe(rank=4)
    assert recipe.but(lam=3.0) == Recipe(rank=4, lam=3.0)
    assert recipe == Recipe(rank=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.rank = 5


# Variant, init, rank, skip-layers, α and λ as in the paper's table of configurations; γ = 0.5 everywhere.
CONFIGURATIONS = [
    ("pca", "pretrained", 64, 45, 1.6, 5),
    ("cav-kmeans", "pretrained", 16, 35, 2.5, 5),
    ("cav-class", "pretrained", 16, 35, 2.5, 5),
    ("pca", "zero", 128, 45, 1.25, 50),
    ("cav-kmeans", "zero", 16, 40, 1.0, 50),
    ("cav-class", "zero", 16, 40, 1.3, 50),
]


@pytest.mark.parametrize(("variant", "init", "rank", "skip", "alpha", "lam"), CONFIGURATIONS)
def test_the_paper_recipes_are_its_table(variant, init, rank, skip, alpha, lam):
    recipe = Recipe.paper(variant, init)
    assert (recipe.basis, recipe.rank, recipe.skip_layers) == (variant, rank, skip)
    assert (recipe.alpha, recipe.lam, recipe.gamma) == (alpha, lam, 0.5)
    assert (recipe.solver, recipe.steps, recipe.lr) == ("budgeted", 100, 1e-3)
    assert (recipe.mean, recipe.head, recipe.centering) == ("free", "edit", "separate")


def test_a_configuration_that_the_paper_lacks_is_refused_with_those_it_has():
    with pytest.raises(RecipeError, match=r"'cav-class', init='pretrained'"):
        Recipe.paper("lda")
    with pytest.raises(RecipeError, match="init='random'"):
        Recipe.paper("pca", init="random")


def test_a_predicate_is_no_plain_value():
    with pytest.raises(RecipeError, match="function"):
        Recipe(layers=lambda name, module: True).to_dict()
