"""Models whose weights accelerate keeps elsewhere, against the same models as they are."""

import weakref

import pytest
import torch

from decoders import decoder, padded, sentences
from unmerge import Recipe, collect, fit
from unmerge.data.batches import device_of
from unmerge.errors import EditError, LayerError
from unmerge.model.initial import task_vectors
from unmerge.model.selection import select
from unmerge.placement.offloading import parameter_of
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import fingerprint

accelerate = pytest.importorskip("accelerate")
OffloadedWeightsLoader = accelerate.utils.offload.OffloadedWeightsLoader

RECIPE = Recipe(layers="last2", rank=2, retain_rank=2)
KINDS = ("llama", "gpt2", "mixtral")


def data():
    forget = [padded(sentences((5, 6, 4, 9, 8), seed, 3, 12)) for seed in range(3)]
    return forget, [padded(sentences((6, 4, 7, 5, 9), 10 + seed, 9, 23)) for seed in range(4)]


def offloaded(kind, place, folder=None, **options):
    model = decoder(kind, **options)
    if place == "memory":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_is_fitted_to_offloaded_weights(kind, place, tmp_path):
    plain, model, (forget, retain) = decoder(kind), offloaded(kind, place, tmp_path), data()
    assert next(model.parameters()).is_meta
    assert device_of(model) == torch.device("cpu")
    assert fingerprint(state_of(model)) == fingerprint(state_of(plain))
    init = decoder(kind, seed=1).state_dict()
    options = {"recipe": RECIPE, "check_init": False, "on_verdict": "ignore"}
    expected = fit(plain, forget, retain, init=init, **options)
    for memory in (None, "1MB"):
        found = fit(model, forget, retain, init=init, memory=memory, **options)
        assert found.layers.keys() == expected.layers.keys()
        for name, layer in expected.layers.items():
            torch.testing.assert_close(found.layers[name].B @ found.layers[name].Q.T, layer.B @ layer.Q.T)
    assert next(model.parameters()).is_meta


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_is_applied_to_weights_in_memory_and_reverted(kind):
    plain, model, (forget, retain) = decoder(kind), offloaded(kind, "memory"), data()
    edit = fit(model, forget, retain, init="zero", recipe=RECIPE, on_verdict="ignore")
    inputs = {key: retain[0][key] for key in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        before = model(**inputs).logits
        edit.apply(model, alpha=0.5)
        edit.apply(plain, alpha=0.5)
        edited = model(**inputs).logits
        torch.testing.assert_close(edited, plain(**inputs).logits)
        assert not torch.allclose(edited, before)
        edit.revert(model)
        assert torch.equal(model(**inputs).logits, before)


def test_weights_on_disk_are_not_edited_in_place(tmp_path):
    model, (forget, retain) = offloaded("llama", "disk", tmp_path), data()
    edit = fit(model, forget, retain, init="zero", recipe=RECIPE, on_verdict="ignore")
    with pytest.raises(EditError, match=r"offloaded to disk.*unmerge.edit_checkpoint"):
        edit.apply(model, alpha=1.0)


def test_a_tied_head_is_seen_when_it_is_offloaded():
    selection = select(offloaded("llama", "memory", tied=True))
    assert "shares its weight" in selection.left_out["lm_head"]


def test_a_model_that_was_never_loaded_is_named():
    with torch.device("meta"):
        layer = torch.nn.Linear(3, 3)
    with pytest.raises(LayerError, match="never loaded"):
        parameter_of(layer, "weight")
    with pytest.raises(LayerError, match="weight is on the meta device: the model was never loaded"):
        collect(torch.nn.Sequential(layer), [torch.zeros(2, 3)])


def test_weights_on_disk_are_read_one_at_a_time_and_once(tmp_path, monkeypatch):
    model = offloaded("llama", "disk", tmp_path)
    expected = fingerprint(state_of(decoder("llama")))
    read, most = [], 0
    plain = OffloadedWeightsLoader.__getitem__

    def counted(loader, key):
        nonlocal most
        value = plain(loader, key)
        read.append((key, weakref.ref(value)))
        most = max(most, sum(alive() is not None for _, alive in read))
        return value

    monkeypatch.setattr(OffloadedWeightsLoader, "__getitem__", counted)
    state = state_of(model)
    assert not read
    assert fingerprint(state) == expected
    names = [key for key, _ in read]
    assert len(names) == len(set(names)) > 10
    assert most <= 2, "the one before, while the next is read"
    layers = select(model, "mlp").names
    read.clear()
    vectors = task_vectors(model, "zero", layers)
    assert len(vectors) == len(layers) == 9
    assert "model.layers.0.mlp.down_proj.weight" in state
    assert "nothing" not in state
    assert not read, "asking for names reads nothing"
    assert vectors.of(layers[3]).equal(decoder("llama").get_submodule(layers[3]).weight)
    assert [key for key, _ in read] == [f"{layers[3]}.weight"]
