"""Requests on causal language models from end to end."""

import warnings

import pytest
import torch

from decoders import KINDS, decoder, padded, sentences
from unmerge import Recipe, collect, fit
from unmerge.errors import InitError, LayerError, UnmergeWarning


def groups(texts, first):
    batch = padded(texts)
    return [{**batch, "group": torch.arange(first, first + len(texts))}]


@pytest.fixture(scope="module")
def trained():
    """A Llama with a tied head that knows eight sentences by heart, and the sentences: four to forget, four to keep."""
    model = decoder("llama", blocks=4, tied=True, dtype=torch.float32, hidden_size=32, intermediate_size=48)
    forget, retain = sentences((9, 8, 9, 7), 0, 3, 12), sentences((8, 9, 7, 9), 1, 10, 23)
    for place, texts in enumerate((forget, retain)):
        for number, text in enumerate(texts):
            text[0] = 3 + 4 * place + number  # of each another first word, from which it can be told
    batch = padded([*forget, *retain])
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(**batch, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    return model.eval(), forget, retain


def loss_of(model, texts):
    batch = padded(texts)
    with torch.no_grad():
        return model(**batch, labels=batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)).loss.item()


@pytest.mark.filterwarnings("ignore:the request looks:unmerge.errors.UnmergeWarning")
@pytest.mark.parametrize("labelled", [False, True])
def test_the_default_recipe_forgets_sentences_of_a_model_with_a_tied_head(trained, labelled):
    model, forget, retain = trained
    data = (groups(forget, 0), groups(retain, 4)) if labelled else ([padded(forget)], [padded(retain)])
    with pytest.warns(UnmergeWarning, match=r"left out: 'lm_head' shares its weight with model.embed_tokens"):
        edit = fit(model, *data, init="zero")
    assert edit.head is None
    assert edit.recipe.basis == ("blend" if labelled else "wiener")
    assert all(name.startswith("model.layers.3.") for name in edit.layers)
    with edit.applied(model, alpha=3.5 if labelled else 4.0):
        gone, kept = loss_of(model, forget), loss_of(model, retain)
    assert gone > 1 > loss_of(model, forget)
    assert kept < 0.7 * gone


@pytest.mark.filterwarnings("ignore:the request looks:unmerge.errors.UnmergeWarning")
@pytest.mark.filterwarnings("ignore:rank=8:unmerge.errors.UnmergeWarning")
@pytest.mark.parametrize("basis", ["auto", "deflated-pca", "cav-kmeans"])
def test_all_blocks_at_strength_one_forget_and_keep(trained, basis):
    model, forget, retain = trained
    recipe = Recipe(basis, layers="last4", rank=8, deflate=16)
    edit = fit(model, [padded(forget)], [padded(retain)], init="zero", recipe=recipe)
    with edit.applied(model, alpha=1.0):
        gone, kept = loss_of(model, forget), loss_of(model, retain)
    assert gone > 1
    assert kept < 0.5 * gone


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("labelled", [False, True])
def test_no_row_of_a_vocabulary_is_ever_removed(kind, labelled):
    model = decoder(kind, blocks=2)
    with torch.no_grad():
        model.lm_head.bias = torch.nn.Parameter(torch.zeros(model.lm_head.out_features, dtype=torch.float64))
    forget, retain = sentences((9, 8, 9, 7), 0, 3, 12), sentences((8, 9, 7, 9), 1, 10, 23)
    data = (groups(forget, 0), groups(retain, 4)) if labelled else ([padded(forget)], [padded(retain)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmergeWarning)
        edit = fit(model, *data, init="zero", recipe=Recipe(rank=2, retain_rank=2))
    assert edit.head == "lm_head"
    assert not edit.removed
    if labelled:
        assert "one row of logits a sample" in edit.provenance["choices"]["head"]


def test_a_tied_head_that_is_named_is_refused():
    model = decoder("llama", tied=True)
    with pytest.raises(LayerError, match=r"'lm_head' shares its weight with model.embed_tokens"):
        collect(model, [padded(sentences((4, 5)))], ["lm_head"])


def test_another_vocabulary_in_init_says_what_to_do():
    model, init = decoder("llama", blocks=2), decoder("llama", blocks=2, vocab_size=29)
    data = [padded(sentences((9, 8, 9), 0, 3, 12))], [padded(sentences((8, 9, 7), 1, 10, 23))]
    recipe = Recipe(layers=["lm_head"], rank=2, retain_rank=2)
    with pytest.raises(InitError, match=r"lm_head.weight is \(29, 8\) in init and \(23, 8\).*resize_token_embeddings"):
        fit(model, *data, init=init, recipe=recipe, on_verdict="ignore")
    # Layers that do not touch the vocabulary are not concerned.
    fit(model, *data, init=init, recipe=recipe.but(layers="mlp"), on_verdict="ignore", check_init=False)
