"""Statistics add, subtract, travel through files bit by bit, and belong to one checkpoint."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from networks import batched, cnn, convolution_net, hf_vit, mlp, samples, split
from unmerge import Moments, Recipe, Statistics, collect, fit, tokens
from unmerge.errors import FileError, StatisticsError
from unmerge.requests.gathering import pair_of
from unmerge.requests.request import Request
from unmerge.storage.files import read_tensors, write_tensors

LABELS = [3, 0, 1, 0, 3, 1, 1, 0, 3, 3, 0, 1]


def assert_same(found: Moments, expected: Moments) -> None:
    assert found.n == expected.n
    assert_close(found.mean, expected.mean)
    assert_close(found.scatter, expected.scatter)


def assert_same_statistics(found: Statistics, expected: Statistics) -> None:
    assert found.samples == expected.samples
    assert (found.classes, found.class_samples) == (expected.classes, expected.class_samples)
    assert (found.weights, found.head, found.shift_to) == (expected.weights, expected.head, expected.shift_to)
    assert found.layers.keys() == expected.layers.keys()
    for name, layer in found.layers.items():
        assert_same(layer.moments, expected[name].moments)
        assert_close(layer.class_rows, expected[name].class_rows)
        assert_close(layer.class_sums, expected[name].class_sums)


KINDS = {"cnn": (cnn, (3, 6, 6)), "grouped": (lambda: convolution_net("groups"), (4, 6, 7)), "vit": (hf_vit, (3, 8, 8))}


@pytest.mark.parametrize("kind", KINDS)
def test_everything_less_the_forgotten_is_the_retained(kind):
    make, shape = KINDS[kind]
    model, data = make(), samples(shape, LABELS)
    forget, retain = split(data, [1])
    everything = collect(model, batched(data, 5))
    taken = collect(model, batched(forget, 3), everything.layers)
    assert_same_statistics(everything - taken, collect(model, batched(retain, 4)))


@pytest.mark.parametrize("kind", KINDS)
def test_halves_add_up_to_the_whole(kind):
    make, shape = KINDS[kind]
    model, data = make(), samples(shape, LABELS)
    halves = [collect(model, [(data[0][part], data[1][part])]) for part in (slice(5), slice(5, None))]
    assert_same_statistics(halves[0] + halves[1], collect(model, [data]))


@given(st.sets(st.integers(0, 11), min_size=1, max_size=11))
@settings(max_examples=25, deadline=None)
def test_any_samples_can_be_taken_out_and_put_back(chosen):
    model, (inputs, labels) = mlp(), samples((6,), LABELS)
    places = torch.tensor(sorted(chosen))
    rest = torch.tensor(sorted(set(range(12)) - chosen))
    everything = collect(model, [(inputs, labels)])
    part = collect(model, [(inputs[places], labels[places])])
    left = everything - part
    assert_same_statistics(left, collect(model, [(inputs[rest], labels[rest])]))
    assert_same_statistics(left + part, everything)


def test_layers_that_shared_their_value_share_it_afterwards():
    model, data = hf_vit(), samples((3, 8, 8), LABELS)
    everything = collect(model, [data])
    part = collect(model, [split(data, [3])[0]])
    for combined in (everything - part, everything + part, everything.to("cpu")):
        assert len({id(layer) for layer in combined.layers.values()}) == len(combined.layers) - 4


def test_neither_side_changes():
    model, data = mlp(), samples((6,), LABELS)
    everything, part = collect(model, [data]), collect(model, [split(data, [3])[0]])
    before = everything["0"].class_sums.clone(), everything["0"].moments.clone()
    (everything - part)["0"].class_sums.zero_()
    (everything + part)["0"].moments.update(torch.ones(2, 6, dtype=torch.float64))
    assert everything["0"].class_sums.equal(before[0])
    assert_same(everything["0"].moments, before[1])


def test_labels_on_one_side_only_leave_no_classes_of_the_difference():
    model, data = mlp(), samples((6,), LABELS)
    forget, retain = split(data, [1])
    everything, unlabelled = collect(model, [data]), collect(model, [forget[0]])
    left = everything - unlabelled
    assert left.classes == ()
    assert_same(left["0"].moments, collect(model, [retain])["0"].moments)
    assert (collect(model, [data[0]]) - collect(model, [forget])).classes == ()
    with pytest.raises(StatisticsError, match="with labels and statistics without"):
        everything + unlabelled


# ---- refusals


def test_statistics_of_different_layers_do_not_combine():
    model, data = mlp(), samples((6,), LABELS)
    everything, part = collect(model, [data]), collect(model, [split(data, [3])[0]], ["0", "4"])
    for combine in (Statistics.__add__, Statistics.__sub__):
        with pytest.raises(StatisticsError, match=r"different layers: 2 .*layers=statistics, the first ones"):
            combine(everything, part)


def test_statistics_of_different_weights_do_not_combine():
    model, data = mlp(), samples((6,), LABELS)
    everything = collect(model, [data])
    with torch.no_grad():
        model[2].bias[1] += 1
    part = collect(model, [split(data, [3])[0]])
    for combine in (Statistics.__add__, Statistics.__sub__):
        with pytest.raises(StatisticsError, match=r"different weights: '2\.bias'"):
            combine(everything, part)


def test_more_samples_than_there_are_cannot_be_taken_out():
    model, data = mlp(), samples((6,), LABELS)
    everything = collect(model, [data])
    with pytest.raises(StatisticsError, match="cannot take 12 samples out of 12"):
        everything - everything
    with pytest.raises(StatisticsError, match="cannot take 24 samples out of 12"):
        everything - (everything + everything)


@pytest.mark.parametrize("labels", [[3, 3, 3, 3, 3], [7]])
def test_more_of_a_class_than_there_is_cannot_be_taken_out(labels):
    model = mlp()
    everything = collect(model, [samples((6,), LABELS)])
    part = collect(model, [samples((6,), labels)])
    have = LABELS.count(labels[0])
    with pytest.raises(StatisticsError, match=f"{len(labels)} samples of class {labels[0]} out of {have}"):
        everything - part


def test_samples_that_were_not_part_cannot_be_taken_out():
    model = mlp()
    everything = collect(model, [samples((6,), LABELS)])
    inputs, labels = samples((6,), [3, 0, 1])
    with pytest.raises(StatisticsError, match="not among those counted"):
        everything - collect(model, [(100 * inputs, labels)])


def test_only_statistics_combine_with_statistics():
    everything = collect(mlp(), [samples((6,), LABELS)])
    for other in (1, None, Moments()):
        with pytest.raises(TypeError, match="Statistics"):
            everything + other
        with pytest.raises(TypeError, match="Statistics"):
            everything - other


def test_a_layer_that_is_not_there_is_named_with_those_that_are():
    with pytest.raises(StatisticsError, match=r"no layer 'head'.*0, 2, 4"):
        collect(mlp(), [samples((6,), LABELS)])["head"]


@pytest.mark.parametrize("side", ["forget", "retain", "statistics"])
def test_statistics_of_another_checkpoint_name_the_first_tensor_that_differs(side):
    model, data = cnn(), samples((3, 6, 6), LABELS)
    forget, retain = ([part] for part in split(data, [1]))
    if side == "statistics":
        request = {"classes": [1], "statistics": collect(model, [data])}
    elif side == "forget":
        request = {"forget": collect(model, forget), "retain": retain}
    else:
        request = {"forget": forget, "retain": collect(model, retain)}
    with torch.no_grad():
        model.bn2.bias[0] += 1e-3
        model.fc.weight[0, 0] += 1e-3
    with pytest.raises(StatisticsError, match=r"'bn2\.bias' differs"):
        fit(model, **request, init="zero", recipe=Recipe(skip_layers=0))


# ---- which tokens are counted


def of_tokens(mask, rows=6) -> Statistics:
    batch = {"x": torch.eye(6, dtype=torch.float64).repeat(rows, 1, 1), "odd": torch.arange(6).repeat(rows, 1) % 2}
    batch["labels"] = torch.where(batch["odd"] > 0, 5, -100)
    batch["attention_mask"] = torch.ones(rows, 6)
    return collect(mlp(), [batch], mask=mask, forward=lambda model, batch: model(batch["x"]))


MASKS = {"all": None, "answer": tokens.answer, "question": tokens.question, "odd": "odd", "custom": lambda b: b["odd"]}


@pytest.mark.parametrize("counted", MASKS)
def test_statistics_say_which_tokens_they_count_also_in_a_file(counted, tmp_path):
    found = of_tokens(MASKS[counted])
    assert found.counted == counted
    found.save(tmp_path / "all.safetensors")
    assert Statistics.load(tmp_path / "all.safetensors").counted == counted
    half = of_tokens(MASKS[counted], rows=3)
    assert (found + half).counted == (found - half).counted == counted
    assert pair_of(mlp(), half, found - half, Recipe()).statistics.counted == counted


@pytest.mark.parametrize(("one", "other"), [("all", "answer"), ("answer", "odd"), ("odd", "custom")])
def test_statistics_of_different_tokens_neither_combine_nor_pair(one, other):
    many, few = of_tokens(MASKS[one]), of_tokens(MASKS[other], rows=3)

    def paired(mine: Statistics, theirs: Statistics) -> Request:
        return pair_of(mlp(), mine, theirs, Recipe())

    for combine in (Statistics.__add__, Statistics.__sub__, paired):
        with pytest.raises(StatisticsError, match=f"different tokens: '{one}' are counted .* '{other}' in the other"):
            combine(many, few)


def test_two_functions_without_a_name_are_not_told_apart():
    assert (of_tokens(lambda batch: batch["odd"]) + of_tokens(lambda batch: batch["odd"] * 2)).counted == "custom"


def test_a_request_in_which_one_mask_was_forgotten_is_refused():
    forget = of_tokens(tokens.answer)
    batch = {"x": torch.eye(6, dtype=torch.float64).repeat(2, 1, 1)}
    with pytest.raises(StatisticsError, match="cannot pair statistics of different tokens: 'answer'"):
        fit(mlp(), forget, [batch], init="zero", forward=lambda model, batch: model(batch["x"]))


def test_a_file_that_does_not_say_which_tokens_combines_with_any(tmp_path):
    path = tmp_path / "all.safetensors"
    of_tokens(tokens.answer).save(path)
    reseal(path, lambda tensors, header: header.pop("counted"))
    old = Statistics.load(path)
    assert old.counted is None
    assert (old - of_tokens(tokens.answer, rows=3)).counted is None
    assert (of_tokens("odd", rows=3) + old).counted is None


# ---- files


def collected(kind: str) -> Statistics:
    if kind == "shared":
        return collect(hf_vit(dtype=torch.float32), batched(samples((3, 8, 8), LABELS, torch.float32), 5))
    if kind == "full":
        return collect(convolution_net("groups"), batched(samples((4, 6, 7), LABELS), 5), per_class="full")
    if kind == "sample":
        return collect(cnn(), batched(samples((3, 6, 6), LABELS), 5), sample=20)
    return collect(cnn(), [samples((3, 6, 6), LABELS)[0]])  # without labels


def bit_equal(found: Moments, expected: Moments) -> bool:
    parts = ("pivot", "total", "gram")
    return found.n == expected.n and all(getattr(found, part).equal(getattr(expected, part)) for part in parts)


@pytest.mark.parametrize("kind", ["shared", "full", "sample", "unlabelled"])
def test_what_is_loaded_equals_what_was_saved_bit_by_bit(kind, tmp_path):
    saved = collected(kind)
    saved.save(tmp_path / "deep" / "all.safetensors")
    loaded = Statistics.load(tmp_path / "deep" / "all.safetensors")
    for part in ("samples", "weights", "classes", "class_samples", "head", "shift_to", "left_out", "counted"):
        assert getattr(loaded, part) == getattr(saved, part)
    assert list(loaded.layers) == list(saved.layers)
    for name, layer in loaded.layers.items():
        assert bit_equal(layer.moments, saved[name].moments)
        assert layer.moments.gram.dtype == saved[name].moments.gram.dtype
        assert layer.class_rows.equal(saved[name].class_rows)
        assert layer.class_sums.equal(saved[name].class_sums)
        assert layer.class_moments.keys() == saved[name].class_moments.keys()
        for place, moments in layer.class_moments.items():
            assert bit_equal(moments, saved[name].class_moments[place])
        assert (layer.sample is None) == (saved[name].sample is None)
        if layer.sample is not None:
            assert layer.sample.equal(saved[name].sample)


def test_layers_that_share_their_value_are_stored_once(tmp_path):
    saved = collected("shared")
    saved.save(tmp_path / "all.safetensors")
    loaded = Statistics.load(tmp_path / "all.safetensors")
    assert len({id(layer) for layer in loaded.layers.values()}) == len(loaded.layers) - 4
    grams = sum(layer.moments.gram.nbytes for layer in {id(one): one for one in saved.layers.values()}.values())
    assert (tmp_path / "all.safetensors").stat().st_size < 2 * grams + 40_000


def test_loaded_statistics_serve_a_request(tmp_path):
    model, data = cnn(), samples((3, 6, 6), LABELS)
    forget, retain = split(data, [1])
    collect(model, [data]).save(tmp_path / "all.safetensors")
    everything = Statistics.load(tmp_path / "all.safetensors")
    taken = collect(model, [forget], everything.layers)
    recipe = Recipe(skip_layers=0)
    found = fit(model, taken, everything - taken, init="zero", recipe=recipe)
    expected = fit(model, [forget], [retain], init="zero", recipe=recipe)
    for name, layer in found.layers.items():
        other = expected.layers[name]
        assert_close(layer.B @ layer.Q.mT, other.B @ other.Q.mT)


def test_saving_leaves_the_statistics_usable_and_overwrites(tmp_path):
    saved, path = collected("full"), tmp_path / "all.safetensors"
    path.write_bytes(b"older")
    saved.save(path)
    saved.save(path)
    assert_same_statistics(Statistics.load(path), saved)


def reseal(path, change) -> None:
    """Rewrite a file of ours with a changed header and a right seal, as another version would write it."""
    tensors, header = read_tensors(path, "statistics")
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    change(tensors, header)
    write_tensors(path, tensors, "statistics", header)


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, header: header.pop("samples"),
        lambda tensors, header: header.pop("layers"),
        lambda tensors, header: header.update(layers=[1, 2]),
        lambda tensors, header: header.update(classes=7),
        lambda tensors, header: header["layers"]["fc"].pop("rows"),
        lambda tensors, header: header["layers"].update(fc={"same_as": "elsewhere"}),
        lambda tensors, header: header["layers"].update(fc=None),
        lambda tensors, header: header.update(counted=3),
        lambda tensors, header: tensors.pop("fc:gram"),
        lambda tensors, header: tensors.pop("fc:class_sums"),
    ],
    ids=["samples", "layers", "list", "classes", "rows", "twin", "null", "counted", "gram", "sums"],
)
def test_a_file_of_another_version_is_a_file_error(change, tmp_path):
    path = tmp_path / "all.safetensors"
    collected("sample").save(path)
    reseal(path, change)
    with pytest.raises(FileError, match=r"all\.safetensors"):
        Statistics.load(path)


def test_a_header_that_was_changed_by_hand_is_a_file_error(tmp_path):
    path = tmp_path / "all.safetensors"
    collected("sample").save(path)
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    inner = json.loads(header["__metadata__"]["header"])
    inner["class_samples"][0] += 1
    header["__metadata__"]["header"] = json.dumps(inner)
    changed = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(changed)) + changed + raw[8 + size :])
    with pytest.raises(FileError, match="changed after it was written"):
        Statistics.load(path)


def devices(statistics: Statistics) -> dict[str, str]:
    return {name: layer.device.type for name, layer in statistics.layers.items()}


def test_statistics_of_a_model_on_several_devices_meet_layer_by_layer():
    """Loaded statistics are on the CPU; the meta device stands for a second GPU."""
    model, data = mlp(), samples((6,), LABELS)
    forget, retain = (collect(model, [part], ["0", "2", "4"]) for part in split(data, [3]))
    places = {"0": torch.device("cpu"), "2": torch.device("meta"), "4": torch.device("cpu")}
    expected = {"0": "cpu", "2": "meta", "4": "cpu"}
    spread = forget.at(places)
    assert devices(spread) == devices(retain.beside(spread)) == expected
    assert retain.beside(forget) is retain, "nothing to move"
    for found in (spread + retain, spread.without_classes() + retain.without_classes()):
        assert devices(found) == expected
    request = pair_of(model, spread, retain, Recipe(basis="lda"))
    assert request.retain is not None
    assert devices(request.retain) == expected
    assert request.retain["2"].class_sums.is_meta
    assert_same((spread + retain)["0"].moments, (forget + retain)["0"].moments)


def test_layers_that_share_their_statistics_share_them_on_another_device():
    model = hf_vit()
    found = collect(model, [samples((3, 8, 8), LABELS)])
    assert len({id(layer) for layer in found.layers.values()}) < len(found.layers)
    moved = found.to("meta")
    assert set(devices(moved).values()) == {"meta"}
    assert moved.probe.leader == found.probe.leader
