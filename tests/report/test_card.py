"""The model card: front matter that the Hub reads, and the recipe as YAML that says the same as the edit."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unmerge import Recipe
from unmerge.interop.card import model_card, yaml_block

yaml = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def edit(finished_run):
    return json.loads((finished_run / "edit" / "edit.json").read_text())


def front_matter(card):
    assert card.startswith("---\n")
    return yaml.safe_load(card.split("---\n")[1])


def test_front_matter_and_recipe(edit):
    card = model_card(edit, "microsoft/resnet-18", alpha=1.25, license="apache-2.0", request="label=3")
    front = front_matter(card)
    assert front == {
        "base_model": "microsoft/resnet-18",
        "library_name": "transformers",
        "tags": ["unmerge", "machine-unlearning"],
        "license": "apache-2.0",
    }
    made = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1])
    assert Recipe.from_dict(made["recipe"]) == Recipe.from_dict(edit["recipe"])
    assert made["weights"] == edit["weights"]
    assert made["alpha"] == 1.25
    for said in (
        "# resnet-18 without label=3",
        "not certified deletion",
        "linear probe",
        "edit.revert(model)",
        "α = 1.25",
    ):
        assert said in card


@pytest.mark.parametrize("base", ["/data/model", "./model", "a/b/c", "package.module:function", "C:\\models", ".."])
def test_a_path_is_in_the_text_only(edit, base):
    card = model_card(edit, base)
    assert "base_model" not in front_matter(card)
    assert "license" not in front_matter(card)
    assert f"`{base}`" in card


def test_what_was_removed_and_measured(edit, finished_run):
    evaluation = json.loads((finished_run / "evaluation.json").read_text())
    card = model_card(edit, "resnet-18", evaluation=evaluation)
    assert "without class 3" in card
    assert "never predicted: 3" in card
    rows = evaluation["tables"]["accuracy"]["rows"]
    assert f"| unmerge | {100 * rows['unmerge']['forget']['value']:.2f} |" in card
    assert "## Measured" not in model_card(edit, "resnet-18")
    some = model_card(edit | {"removed": [], "provenance": edit["provenance"] | {"classes": []}}, "resnet-18")
    assert "a set of samples" in some


def test_hostile_words_stay_in_their_place(edit):
    hostile = "---\nlicense: stolen\n```\n<script>alert(1)</script> | `x`"
    card = model_card(edit, hostile, request=hostile, license=hostile, library_name=hostile)
    front = front_matter_of_hub(card)
    assert front["license"] == front["library_name"] == hostile
    assert "<script>" not in re.sub(r"`+[^`]*`+", "", card.split("\n---\n", 1)[1]).replace("\\<script", "")


def front_matter_of_hub(card):
    """As the Hub's own library reads it."""
    hub = pytest.importorskip("huggingface_hub")
    return hub.ModelCard(card, ignore_metadata_errors=False).data.to_dict()


def test_the_hubs_library_reads_it(edit):
    front = front_matter_of_hub(model_card(edit, "microsoft/resnet-18", license="mit"))
    assert front["base_model"] == "microsoft/resnet-18"
    assert front["tags"] == ["unmerge", "machine-unlearning"]


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()


@given(st.dictionaries(st.text(), scalars | st.lists(scalars) | st.dictionaries(st.text(), scalars)))
def test_yaml_reads_back(values):
    assert (yaml.safe_load(yaml_block(values)) or {}) == values
