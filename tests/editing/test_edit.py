"""An edit is applied all or nothing, reverted bit by bit, bound to its weights, and travels as a directory."""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.testing import assert_close

from full_disk import full_after
from networks import CONVOLUTIONS, batched, cnn, conv1d_net, convolution_net, hf_vit, mlp, request, samples
from unmerge import Edit, LayerEdit, Recipe, collect, fit, search_alpha
from unmerge.errors import EditError, FileError
from unmerge.model.layers import from_matrix
from unmerge.storage.files import read_tensors, write_tensors

ALL = Recipe(skip_layers=0)
EDITED = ALL.but(head="edit")


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_bits(model: nn.Module, expected: dict[str, Tensor]) -> None:
    assert_close(bits(model), expected, rtol=0, atol=0)


def edit_of(model: nn.Module, shape: tuple[int, ...] = (6,), recipe: Recipe = ALL, **options: object) -> Edit:
    dtype = next(model.parameters()).dtype
    forget, retain = request(shape, forgotten=(0,), kept=(1, 2), dtype=dtype)
    return fit(model, batched(forget, 5), batched(retain, 5), init="zero", recipe=recipe, **options)


MODELS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (6,)),
    "cnn": (cnn, (3, 6, 6)),
    "conv1d": (conv1d_net, (6,)),
    "vit": (hf_vit, (3, 8, 8)),
    **{f"conv-{kind}": (lambda dtype, kind=kind: convolution_net(kind, dtype), (4, 6, 7)) for kind in CONVOLUTIONS},
}


# ---- apply and revert


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("mean", ["free", "auto"])
def test_apply_subtracts_alpha_b_q_and_adds_the_shift(kind, mean):
    make, shape = MODELS[kind]
    model = make(dtype=torch.float64)
    edit = edit_of(model, shape, EDITED.but(mean=mean))
    expected = bits(model)
    for name, layer in edit.layers.items():
        weight = expected[f"{name}.weight"]
        delta = from_matrix(layer.B @ layer.Q.mT, weight, layer.transposed)
        expected[f"{name}.weight"] = weight - 0.7 * delta
        identity = torch.eye(layer.rank, dtype=torch.float64)
        assert_close(layer.Q.mT @ layer.Q, identity.expand(*layer.Q.shape[:-2], -1, -1))
        if layer.shift is not None:
            sign = -1 if layer.shift_to.endswith("running_mean") else 1
            expected[layer.shift_to] = expected[layer.shift_to] + sign * 0.7 * layer.shift
    assert edit.apply(model, alpha=0.7) is model
    assert_close(bits(model), expected)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_revert_is_bit_identical(kind, dtype):
    make, shape = MODELS[kind]
    model = make(dtype=dtype)
    edit, before = edit_of(model, shape), bits(model)
    edit.apply(model, 1.7)
    assert any(not tensor.equal(before[name]) for name, tensor in bits(model).items())
    assert edit.revert(model) is model
    assert_bits(model, before)


def test_fitting_leaves_the_model_alone():
    model = cnn(dtype=torch.float32).train()
    before = bits(model)
    edit_of(model, (3, 6, 6))
    assert_bits(model, before)
    assert all(module.training for module in model.modules())


def test_the_models_own_tensors_change_in_place():
    model = mlp()
    edit, parameters = edit_of(model), dict(model.named_parameters())
    versions = {name: tensor.data_ptr() for name, tensor in model.named_parameters()}
    edit.apply(model, 1.0)
    assert all(model.get_parameter(name) is tensor for name, tensor in parameters.items())
    assert {name: tensor.data_ptr() for name, tensor in model.named_parameters()} == versions
    assert all(tensor.requires_grad and tensor.is_leaf for tensor in parameters.values())


def test_alpha_zero_changes_nothing_but_removed_rows():
    model = mlp()
    before = bits(model)
    edit_of(model, recipe=EDITED).apply(model, 0.0)
    assert_bits(model, before)


def test_twice_is_an_error_and_changes_nothing():
    model = mlp()
    edit = edit_of(model)
    edit.apply(model, 1.0)
    once = bits(model)
    with pytest.raises(EditError, match="already"):
        edit.apply(model, 1.0)
    with pytest.raises(EditError, match="already"):
        edit.apply(model, 1.0, force=True)
    assert_bits(model, once)


def test_an_edit_that_is_read_twice_is_the_same_edit(tmp_path):
    model = mlp()
    edit = edit_of(model)
    before = bits(model)
    edit.save(tmp_path)
    edit.apply(model, 1.0)
    once = bits(model)
    with pytest.raises(EditError, match="already"):
        Edit.load(tmp_path).apply(model, 1.0)
    with pytest.raises(EditError, match="already"):
        search_alpha(Edit.load(tmp_path), model, [])
    assert_bits(model, once)
    Edit.load(tmp_path).revert(model)
    assert_bits(model, before)


def test_half_of_an_edit_is_another_edit():
    model = mlp()
    edit = edit_of(model, recipe=EDITED.but(mean="free"))
    halves = {name: replace(layer, B=layer.B / 2) for name, layer in edit.layers.items()}
    half = replace(edit, layers=halves)
    edit.apply(model, 0.5)
    half.apply(model, 1.0)
    found = bits(model)
    half.revert(model)
    edit.revert(model)
    edit.apply(model, 1.0)
    assert_close(found, bits(model))


def test_an_edit_inside_autocast_is_seen():
    model = mlp(dtype=torch.float32)
    edit, inputs = edit_of(model, recipe=EDITED), torch.randn(20, 6)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        before = model(inputs)
        with edit.applied(model, 1.0):
            edited = model(inputs)
        after = model(inputs)
    assert not torch.equal(before, edited)
    assert torch.equal(before, after)


def test_tensors_made_in_inference_mode_are_refused_and_leave_no_trace():
    with torch.inference_mode():
        model = mlp()
    edit = edit_of(mlp())
    for _ in range(2):
        with pytest.raises(EditError, match="inference_mode"):
            edit.apply(model, 1.0, force=True)
    before = bits(model)
    with torch.inference_mode():
        edit.apply(model, 1.0, force=True)
    for _ in range(2):
        with pytest.raises(EditError, match="inference_mode"):
            edit.revert(model)
    with torch.inference_mode():
        assert edit.revert(model) is model
    assert_bits(model, before)


def test_of_two_edits_on_tensors_of_inference_mode_each_can_still_be_taken_out():
    first, second = edit_of(mlp()), edit_of(mlp(), recipe=EDITED)
    with torch.inference_mode():
        model = mlp()
        before = bits(model)
        first.apply(model, 1.0, force=True)
        second.apply(model, 1.0, force=True)
    with pytest.raises(EditError, match="inference_mode"):
        first.revert(model)
    with torch.inference_mode():
        first.revert(model)
        second.revert(model)
    assert_bits(model, before)


def test_a_fit_that_cannot_set_edits_aside_changes_nothing():
    edit = edit_of(mlp())
    with torch.inference_mode():
        model = mlp()
    statistics = collect(model, [samples((6,), [0, 1, 2, 3] * 10)])
    with torch.inference_mode():
        edit.apply(model, 1.0, force=True)
    edited = bits(model)
    with pytest.raises(EditError, match="inference_mode"):
        fit(model, classes=[1], statistics=statistics, init="zero")
    assert_bits(model, edited)


@pytest.mark.parametrize("what", ["buffers", "everything"])
def test_recalibration_of_tensors_of_inference_mode_is_refused_and_leaves_no_trace(what: str):
    data = [samples((3, 6, 6), [0, 1, 2] * 8)]
    edit = edit_of(cnn(), (3, 6, 6))
    with torch.inference_mode(what == "everything"):
        model = cnn()
    for norm in (module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        with torch.inference_mode():
            norm.running_mean, norm.running_var = norm.running_mean.clone(), norm.running_var.clone()
    before = bits(model)
    with torch.inference_mode(what == "everything"), pytest.raises(EditError, match="inference_mode"):
        edit.apply(model, 1.0, recalibrate=data, force=True)
    assert_bits(model, before)
    with pytest.raises(EditError, match="does not carry"):
        edit.revert(model)


def test_a_replaced_layer_cannot_be_reverted_and_the_edit_stays_known():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    edit, before = edit_of(model), bits(model)
    edit.apply(model, 1.0)
    head = model[2]
    model[2] = nn.Linear(8, 7)
    for force in (False, True):
        with pytest.raises(EditError, match=r"2\.weight.*have other shapes"):
            edit.revert(model, force=force)
    model[2] = head
    edit.revert(model)
    assert_bits(model, before)


def test_reverting_an_edit_that_is_not_carried_is_an_error_and_changes_nothing():
    model = mlp()
    edit, other = edit_of(model), edit_of(model, recipe=EDITED)
    before = bits(model)
    for force in (False, True):
        with pytest.raises(EditError, match="does not carry"):
            edit.revert(model, force=force)
    edit.apply(model, 1.0)
    with pytest.raises(EditError, match="does not carry"):
        other.revert(model)
    edit.revert(model)
    with pytest.raises(EditError, match="does not carry"):
        edit.revert(model)
    assert_bits(model, before)


def test_applied_is_only_inside_the_block_also_after_an_exception():
    model = mlp()
    edit, before = edit_of(model), bits(model)
    with edit.applied(model, alpha=2.0) as inside:
        assert inside is model
        assert not model[2].weight.equal(before["2.weight"])
    assert_bits(model, before)
    with pytest.raises(KeyError), edit.applied(model):
        raise KeyError
    assert_bits(model, before)


def test_applied_takes_the_options_of_apply():
    model = cnn()
    edit, before = edit_of(model, (3, 6, 6)), bits(model)
    _, retain = request((3, 6, 6))
    with edit.applied(model, 1.0, head_alpha=0.0, recalibrate=batched(retain, 4)):
        assert model.bn2.num_batches_tracked == 4
    assert_bits(model, before)


@pytest.mark.parametrize("alpha", [math.nan, math.inf, -math.inf, -1.0, -1e-9, True, False, "1", [1.0]])
@pytest.mark.parametrize("which", ["alpha", "head_alpha"])
def test_a_strength_is_a_finite_number_from_zero(alpha, which):
    model = mlp()
    edit, before = edit_of(model), bits(model)
    with pytest.raises(EditError, match="finite number"):
        edit.apply(model, **{"alpha": 1.0, which: alpha})
    assert_bits(model, before)


def test_without_a_recommendation_alpha_must_be_given():
    model = mlp()
    edit, before = edit_of(model, recipe=EDITED.but(basis="lda")), bits(model)
    assert edit.alpha is None
    with pytest.raises(EditError, match="alpha="):
        edit.apply(model)
    assert_bits(model, before)
    recommended = edit_of(model, recipe=EDITED.but(alpha=1.3))
    recommended.apply(model)
    found = bits(model)
    recommended.revert(model)
    recommended.apply(model, 1.3)
    assert_bits(model, found)


def test_head_alpha_is_for_the_classifier_alone():
    model, other = mlp(), mlp()
    edit = edit_of(model, recipe=EDITED)
    edit.apply(model, 1.0, head_alpha=2.5)
    found = bits(model)
    expected = bits(edit.apply(other, 1.0))
    edit.revert(other)
    expected |= {name: tensor for name, tensor in bits(edit.apply(other, 2.5)).items() if name.startswith("4.")}
    assert_close(found, expected, rtol=0, atol=0)


def test_a_strength_that_overflows_the_type_is_refused_and_changes_nothing():
    model = mlp(dtype=torch.float16)
    edit, before = edit_of(model), bits(model)
    with pytest.raises(EditError, match="lower alpha"):
        edit.apply(model, 1e9)
    assert_bits(model, before)
    edit.apply(model, 1.0)


# ---- all or nothing, and to which weights


def test_an_edit_whose_second_layer_does_not_fit_changes_nothing():
    fitted, narrow = mlp((6, 8, 7, 4)), mlp((6, 8, 5, 4))
    edit, before = edit_of(fitted), bits(narrow)
    for force in (False, True):
        with pytest.raises(EditError, match=r"2\.weight"):
            edit.apply(narrow, 1.0, force=force)
        assert_bits(narrow, before)


def test_a_weight_of_another_shape_but_the_same_size_does_not_fit():
    fitted, turned = mlp(), mlp()
    turned[0] = nn.Linear(8, 6).double()  # (6, 8) where the edit has (8, 6)
    edit, before = edit_of(fitted), bits(turned)
    with pytest.raises(EditError, match=r"0\.weight"):
        edit.apply(turned, 1.0, force=True)
    assert_bits(turned, before)


def test_a_model_without_one_of_the_layers_is_refused():
    edit, other = edit_of(mlp((6, 8, 7, 4))), mlp((6, 8, 4))
    before = bits(other)
    with pytest.raises(EditError, match=r"4\.weight, 4\.bias"):
        edit.apply(other, 1.0)
    assert_bits(other, before)


def test_an_edit_made_by_hand_says_which_layer_is_missing():
    layer = LayerEdit(B=torch.zeros(8, 1), Q=torch.eye(6)[:, :1])
    with pytest.raises(EditError, match="elsewhere"):
        Edit({"elsewhere": layer}, Recipe(), alpha=1.0).apply(mlp())


def test_other_weights_are_refused_with_their_layers_and_force_overrides():
    model, other = mlp(), mlp()
    edit = edit_of(model)
    with torch.no_grad():
        other[2].weight[0, 0] += 1
        other[4].bias[0] += 1
    before = bits(other)
    with pytest.raises(EditError, match=r"other weights of 2, 4.*force=True"):
        edit.apply(other, 1.0)
    assert_bits(other, before)
    edit.apply(other, 1.0, force=True)
    edit.revert(other)
    assert_bits(other, before)


def test_an_edit_fits_another_copy_of_its_checkpoint():
    model = cnn(dtype=torch.float32)
    edit = edit_of(model, (3, 6, 6))
    twin = copy.deepcopy(model)
    edit.apply(model, 1.0)
    edit.apply(twin, 1.0)
    assert_bits(twin, bits(model))


def test_two_edits_of_one_checkpoint_are_applied_together():
    model = mlp()
    first, second = edit_of(model), edit_of(model, recipe=EDITED.but(layers=["2"]))
    alone = bits(second.apply(mlp(), 0.5))
    first.apply(model, 1.0)
    second.apply(model, 0.5)
    first.revert(model)
    assert_bits(model, alone)


# ---- the head


def test_removed_rows_are_zero_with_a_bias_below_every_logit_and_the_width_stays():
    model = cnn()
    edit, kept = edit_of(model, (3, 6, 6)), bits(model)
    assert edit.removed == (0,)
    assert edit.alpha == 1.0
    edit.apply(model)
    assert not model.fc.weight[0].any()
    assert model.fc.bias[0] == -1e4
    assert model.fc.weight.shape == kept["fc.weight"].shape
    assert model.fc.weight[1:].any()


@pytest.mark.parametrize("make", ["half", "bfloat16", "float"])
def test_forgotten_classes_are_never_predicted_in_any_type(make):
    model = cnn(dtype=torch.float32)
    edit_of(model, (3, 6, 6)).apply(model)
    model = getattr(model, make)()
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    inputs = 20 * torch.randn(200, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(inputs.to(model.fc.weight.dtype))
    assert logits.shape == (200, 4)
    assert logits.isfinite().all()
    assert (logits.argmax(1) != 0).all()


@pytest.mark.parametrize("alpha", [0.0, 0.3, 5.0])
def test_removal_does_not_depend_on_alpha(alpha):
    model = mlp()
    edit, before = edit_of(model), bits(model)
    edit.apply(model, alpha)
    assert not model[4].weight[0].any()
    assert model[4].bias[0] == -1e4
    edit.revert(model)
    assert_bits(model, before)


def test_the_rows_that_stay_are_those_of_the_edited_head():
    model, other = mlp(), mlp()
    edit_of(model, recipe=ALL.but(basis="lda")).apply(model, 1.0)
    edit_of(other, recipe=EDITED.but(basis="lda")).apply(other, 1.0)
    assert model[4].weight[1:].equal(other[4].weight[1:])
    assert model[4].bias[1:].equal(other[4].bias[1:])


def test_several_classes_are_removed_and_a_transposed_head_loses_columns():
    from transformers.pytorch_utils import Conv1D

    model = conv1d_net(classes=4)
    model[2] = Conv1D(4, 5).double()
    forget, retain = request((6,), forgotten=(3, 1), kept=(0, 2))
    edit = fit(model, [forget], [retain], init="zero", recipe=ALL)
    assert edit.removed == (1, 3)
    edit.apply(model)
    assert not model[2].weight[:, [1, 3]].any()
    assert model[2].weight[:, [0, 2]].any()
    assert model[2].bias[[1, 3]].tolist() == [-1e4, -1e4]


REMOVE = ALL.but(head="remove")


def test_a_head_without_bias_cannot_lose_rows():
    model = mlp()
    model[4] = nn.Linear(7, 4, bias=False).double()
    with pytest.raises(EditError, match=r"has no bias.*head='edit'"):
        edit_of(model, recipe=REMOVE)
    auto = edit_of(model)
    assert auto.removed == ()
    assert "no bias" in auto.provenance["notes"]["head_not_removed"]


@pytest.mark.parametrize("kind", ["unlabelled", "part of a class"])
def test_a_request_that_is_not_made_of_classes_removes_no_rows(kind):
    model = mlp()
    forget, retain = request((6,))
    if kind == "unlabelled":
        forget, retain = forget[0], retain[0]
    else:
        retain = (torch.cat([retain[0], forget[0][:2]]), torch.cat([retain[1], forget[1][:2]]))
    with pytest.raises(EditError, match=r"whole classes.*head='edit'"):
        fit(model, [forget], [retain], init="zero", recipe=REMOVE)
    assert fit(model, [forget], [retain], init="zero", recipe=ALL).removed == ()


def test_labels_outside_the_head_remove_no_rows():
    model = mlp((6, 8, 2))
    forget, retain = request((6,), forgotten=(5,), kept=(0, 1))
    with pytest.raises(EditError, match=r"labels \[5\].*head='edit'"):
        fit(model, [forget], [retain], init="zero", recipe=REMOVE)


def test_keep_leaves_the_head_alone():
    model = mlp()
    before = bits(model)
    edit_of(model, recipe=ALL.but(head="keep")).apply(model, 1.0)
    assert model[4].weight.equal(before["4.weight"])
    assert model[4].bias.equal(before["4.bias"])
    assert not model[2].weight.equal(before["2.weight"])


def test_a_model_that_is_one_linear_layer_is_edited():
    """A linear probe on features: its layer has the empty name."""
    model = nn.Linear(6, 3).double()
    edit, before = edit_of(model), bits(model)
    edit.apply(model)
    assert not model.weight[0].any()
    edit.revert(model)
    assert_bits(model, before)


# ---- files


@pytest.mark.parametrize("kind", ["mlp", "cnn", "conv1d", "vit", "conv-groups"])
def test_a_loaded_edit_does_what_the_saved_one_did(kind, tmp_path):
    make, shape = MODELS[kind]
    model, other = make(dtype=torch.float32), make(dtype=torch.float32)
    saved = edit_of(model, shape)
    saved.save(tmp_path / "deep" / "edit")
    loaded = Edit.load(tmp_path / "deep" / "edit")
    assert (loaded.recipe, loaded.alpha, loaded.head, loaded.removed) == (
        saved.recipe,
        saved.alpha,
        saved.head,
        saved.removed,
    )
    assert (loaded.weights, loaded.provenance) == (saved.weights, saved.provenance)
    assert list(loaded.layers) == list(saved.layers)
    for name, layer in loaded.layers.items():
        own = saved.layers[name]
        assert layer.B.equal(own.B)
        assert layer.Q.equal(own.Q)
        assert (layer.shift_to, layer.transposed, layer.rank) == (own.shift_to, own.transposed, own.rank)
        assert (layer.shift is None) == (own.shift is None)
        assert layer.shift is None or layer.shift.equal(own.shift)
    saved.apply(model, 1.3)
    loaded.apply(other, 1.3)
    assert_bits(other, bits(model))


def test_the_directory_holds_a_small_safetensors_file_and_readable_json(tmp_path):
    model = cnn()
    edit = edit_of(model, (3, 6, 6), ALL.but(rank=4))
    edit.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edit.json", "edit.safetensors"]
    readable = json.loads((tmp_path / "edit.json").read_text())
    assert readable["recipe"] == ALL.but(rank=4, basis="blend").to_dict()
    assert readable["alpha"] == 1.0
    assert readable["head"] == "fc"
    assert readable["removed"] == [0]
    assert readable["layers"]["conv1"] == {
        "rank": edit.layers["conv1"].rank,
        "shift_to": "bn1.running_mean",
        "transposed": False,
        "beyond_lora": None,
    }
    assert set(readable["weights"]) == {
        *(f"{name}.weight" for name in ("conv1", "conv2", "fc")),
        *("bn1.running_mean", "bn2.running_mean", "fc.bias"),
    }
    assert readable["provenance"]["samples"] == {"forget": 8, "retain": 16}
    assert readable["provenance"]["classes"] == [0]
    assert {"unmerge", "torch", "python", "seconds", "notes"} <= readable["provenance"].keys()
    assert set(load_file(tmp_path / "edit.safetensors")) == {
        f"{name}:{part}" for name in ("conv1", "conv2", "fc") for part in ("B", "Q", "shift")
    }


def test_a_recipe_with_a_predicate_is_saved_as_the_names_it_selected(tmp_path):
    model = cnn()
    edit = edit_of(model, (3, 6, 6), ALL.but(layers=lambda name, module: isinstance(module, nn.Conv2d)))
    edit.save(tmp_path)
    assert Edit.load(tmp_path).recipe.layers == ["conv1", "conv2"]


def test_what_was_left_out_is_recorded():
    model = mlp((6, 6, 6, 4))
    model[2].weight = model[0].weight
    with pytest.warns(UserWarning, match="shares its weight"):
        edit = edit_of(model)
    assert set(edit.provenance["notes"]["left_out"]) == {"0", "2"}


def saved_edit(directory: Path) -> Path:
    edit_of(mlp(dtype=torch.float32)).save(directory)
    return directory / "edit.safetensors"


def test_a_directory_without_an_edit_is_a_file_error(tmp_path):
    path = saved_edit(tmp_path / "edit")
    for wrong in (tmp_path, tmp_path / "nowhere", path):
        with pytest.raises(FileError, match="holds no edit"):
            Edit.load(wrong)


def test_truncated_and_flipped_files_are_file_errors(tmp_path):
    path = saved_edit(tmp_path)
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    for length in (0, 5, 8, 8 + size // 2, 8 + size, len(raw) - 1):
        path.write_bytes(raw[:length])
        with pytest.raises(FileError):
            Edit.load(tmp_path)
    # Every part of the file: the length, the JSON, the recipe within it and the tensors.
    words = [raw.index(word) for word in (b"recipe", b"lda", b"checksums")]
    for at in (0, 3, 8, 20, *words, *range(8 + size, len(raw), 97)):
        flipped = bytearray(raw)
        flipped[at] ^= 1
        path.write_bytes(flipped)
        with pytest.raises(FileError):
            Edit.load(tmp_path)


def test_a_file_of_another_kind_is_a_file_error(tmp_path):
    path = saved_edit(tmp_path)
    tensors, header = read_tensors(path, "edit")
    write_tensors(path, {name: tensor.clone() for name, tensor in tensors.items()}, "statistics", header)
    with pytest.raises(FileError, match="found statistics"):
        Edit.load(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, header: header.pop("recipe"),
        lambda tensors, header: header["recipe"].update(basis="fourier"),
        lambda tensors, header: header["recipe"].update(colour="red"),
        lambda tensors, header: header.update(recipe=None),
        lambda tensors, header: header.update(layers=["0"]),
        lambda tensors, header: header.update(layers=None),
        lambda tensors, header: header["layers"]["2"].pop("transposed"),
        lambda tensors, header: header["layers"].update({"2": None}),
        lambda tensors, header: header.update(removed=7),
        lambda tensors, header: header.pop("weights"),
        lambda tensors, header: tensors.pop("2:Q"),
    ],
    ids=[
        *("no recipe", "value", "field", "null recipe", "list", "null layers", "transposed", "null layer", "removed"),
        *("weights", "tensor"),
    ],
)
def test_a_file_of_another_version_is_a_file_error(change, tmp_path):
    path = saved_edit(tmp_path)
    tensors, header = read_tensors(path, "edit")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors, header)
    write_tensors(path, tensors, "edit", header)
    with pytest.raises(FileError):
        Edit.load(tmp_path)


def test_a_tampered_header_is_a_file_error(tmp_path):
    path = saved_edit(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'\\"removed\\": [0]', b'\\"removed\\": [1]'))
    assert path.read_bytes() != raw
    with pytest.raises(FileError, match="changed after it was written"):
        Edit.load(tmp_path)


def test_the_readable_file_is_not_read(tmp_path):
    saved_edit(tmp_path)
    (tmp_path / "edit.json").write_text("not json")
    assert Edit.load(tmp_path).removed == (0,)


def test_a_write_that_fails_leaves_the_old_edit(tmp_path):
    saved_edit(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = edit_of(mlp((6, 200, 200, 4), dtype=torch.float32), recipe=ALL.but(rank=64))
    with pytest.raises((FileError, OSError)), full_after(4096):
        other.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_an_edit_says_what_it_is():
    edit = edit_of(cnn(), (3, 6, 6))
    assert repr(edit).startswith("Edit(blend, 3 layers")
    assert "removes classes [0]" in repr(edit)


def test_a_notebook_shows_the_layers_and_the_choices() -> None:
    model = mlp()
    forget, retain = request((6,), forgotten=(0,), kept=(1, 2))
    html = fit(model, [forget], [retain], init="zero")._repr_html_()
    assert "<table>" in html
    assert "<li>basis: blend" in html
    assert "Edit(blend" in html
    hostile = Edit({}, Recipe(), 1.0, provenance={"choices": {"<b>": "<script>"}})
    assert "<script>" not in hostile._repr_html_()


def test_an_edit_of_an_earlier_version_loads(tmp_path):
    edit = edit_of(mlp(), recipe=ALL.but(basis="private-mean"))
    edit.save(tmp_path)
    tensors, header = read_tensors(tmp_path / "edit.safetensors", "edit")
    del header["recipe"]["refit"]  # which there was not
    header["recipe"]["solver"] = "budgeted"  # which was not refused, and did nothing
    header["recipe"] |= {"lone_strength": 0.5, "kept_length": 0.0}  # knobs that are gone
    write_tensors(tmp_path / "edit.safetensors", tensors, "edit", header)
    found = Edit.load(tmp_path)
    assert (found.recipe.solver, found.recipe.refit) == ("exact", None)
    model = found.apply(mlp(), 1.0)
    assert_bits(edit.apply(mlp(), 1.0), bits(model))
