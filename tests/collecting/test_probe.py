"""The first samples show what each layer is: its rows, its twin, its head and where a constant goes."""

from __future__ import annotations

import pytest
import torch
from test_unfolding import SamePadding
from torch import Tensor, nn

from decoders import decoder, padded, sentences
from networks import cnn, conv1d_net, hf_resnet, hf_vit, mlp
from unmerge.collecting.hooks import hooked
from unmerge.collecting.probe import Probe, identity, probe
from unmerge.data.batches import Forward
from unmerge.model.evaluating import evaluating
from unmerge.model.selection import select


def look(model: nn.Module, batch: object, forward: Forward | None = None) -> Probe:
    with evaluating(model):
        return probe(model, select(model).names, batch, forward)


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize(
    ("model", "shape", "head"),
    [
        (mlp(), (5, 6), "4"),
        (cnn(), (5, 3, 6, 6), "fc"),
        (conv1d_net(), (5, 6), "2"),
        (hf_vit(), (5, 3, 8, 8), "classifier"),
        (hf_resnet(), (5, 3, 32, 32), "classifier.1"),
    ],
    ids=["mlp", "cnn", "conv1d", "vit", "resnet"],
)
def test_every_layer_of_a_usual_model_is_called_agrees_and_the_head_is_found(model, shape, head):
    found = look(model, images(*shape))
    assert found.called == set(select(model).names)
    assert not found.disagrees
    assert found.head == head


def test_the_head_is_the_layer_whose_output_the_model_returns():
    class Reordered(nn.Module):
        """The classifier stands first, an auxiliary layer last."""

        def __init__(self) -> None:
            super().__init__()
            self.classifier = nn.Linear(6, 3)
            self.body = nn.Linear(6, 6)
            self.auxiliary = nn.Linear(6, 2)

        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            hidden = self.body(inputs)
            return self.classifier(hidden), self.auxiliary(hidden)

    assert look(Reordered().double(), images(3, 6)).head == "classifier"


def test_a_model_that_goes_on_after_its_last_layer_has_no_head():
    model = nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(dim=1)).double()
    assert look(model, images(3, 6)).head is None


def test_layers_with_the_same_input_and_geometry_have_a_leader():
    leaders = look(hf_vit(), images(2, 3, 8, 8)).leader
    assert len(leaders) == 4
    for name, leader in leaders.items():
        assert name.rpartition(".")[0] == leader.rpartition(".")[0]  # the query, key and value of one block


def test_another_geometry_or_another_tensor_is_no_twin():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plain = nn.Conv2d(3, 2, 3, padding=1)
            self.same = nn.Conv2d(3, 4, 3, padding=1)
            self.strided = nn.Conv2d(3, 2, 3, padding=1, stride=2)
            self.copied = nn.Conv2d(3, 2, 3, padding=1)
            self.changed = nn.Conv2d(3, 2, 3, padding=1)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.plain(inputs), self.same(inputs), self.strided(inputs), self.copied(inputs.clone())
            return sum(output.sum() for output in outputs) + self.changed(inputs.mul_(2))

    assert look(Two().double(), images(2, 3, 6, 6)).leader == {"same": "plain"}


def test_a_module_that_pads_by_itself_disagrees_and_the_others_do_not():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), SamePadding(4, 4, 3, stride=2), nn.Conv2d(4, 2, 1)).double()
    assert look(model, images(2, 3, 8, 8)).disagrees == {"1"}


def test_a_layer_that_is_not_reached_is_not_called():
    model = mlp()
    model.spare = nn.Linear(6, 6).double()
    found = look(model, images(2, 6), lambda model, batch: model[4](model[3](model[2](model[1](model[0](batch))))))
    assert found.called == {"0", "2", "4"}


def test_identity_is_of_a_tensor_as_it_is_now():
    tensor = images(4, 6)
    before = identity(tensor)
    assert identity(tensor.view(4, 6)) == before
    assert identity(tensor.clone()) != before
    assert identity(tensor.T) != before
    assert identity(tensor[:2]) != before
    tensor += 1
    assert identity(tensor) != before


def test_identity_is_known_of_inference_tensors_too():
    with torch.inference_mode():
        tensor = images(4, 6)
    assert identity(tensor) == identity(tensor)
    assert identity(tensor) != identity(tensor.clone())


def test_hooks_see_positional_and_keyword_inputs_and_go_away_after_an_exception():
    model = mlp((6, 4))
    seen = []
    inputs = images(3, 6)

    def broken() -> None:
        with hooked(model, ["0"], lambda name, module, given, output, routed: seen.append((name, given, output))):
            model[0](inputs)
            model[0](input=inputs)
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    assert [(name, given is inputs, output.shape) for name, given, output in seen] == [("0", True, (3, 4))] * 2
    assert not model[0]._forward_hooks
    model[0](inputs)
    assert len(seen) == 2


def test_autocast_is_off_inside_a_hook():
    model, enabled = mlp((6, 4), torch.float32), []

    def hook(*_: object) -> None:
        enabled.append(torch.is_autocast_enabled("cpu"))

    with torch.autocast("cpu", torch.bfloat16), hooked(model, ["0"], hook):
        model(torch.zeros(2, 6))
        assert torch.is_autocast_enabled("cpu")
    assert enabled == [False]


def test_a_pivot_is_the_mean_of_the_first_rows():
    found = look(mlp(), images(2, 6) + 3)
    torch.testing.assert_close(found.pivots["0"], images(2, 6).mean(0) + 3)
    assert found.pivots.keys() == {"0", "2", "4"}


def test_where_sums_are_taken_by_shift_the_pivot_is_zero_unless_the_mean_is_far():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 3, stride=2)).double()
    near, far = (look(model, images(2, 3, 6, 6) + mean).pivots for mean in (1, 500))
    assert near["0"].shape == far["0"].shape == (27,)
    assert not near["0"].any()
    assert near["1"].all()
    assert far["0"].all()


def test_rows_that_a_mask_leaves_out_do_not_move_the_pivot():
    batch = padded(sentences([9, 2]), side="left", extra=3)
    model, name = decoder("llama"), "model.layers.0.mlp.gate_proj"
    found = look(model, batch)
    rows: list[Tensor] = []
    with hooked(model, [name], lambda _, __, given, *___: rows.append(given)):
        model(**batch)
    torch.testing.assert_close(found.pivots[name], rows[0][batch["attention_mask"].bool()].mean(0))
    batch |= {"last": batch["attention_mask"].cumsum(1) == 9, "none": batch["attention_mask"] < 0}

    def without_masks(model, batch):
        return model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])

    with evaluating(model):
        last = probe(model, [name], batch, without_masks, "last")
        none = probe(model, [name], batch, without_masks, "none")
        own = probe(model, [name], batch, without_masks, lambda batch: pytest.fail("asked of two samples"))
    torch.testing.assert_close(last.pivots[name], rows[0][0, -1])
    assert not none.pivots
    torch.testing.assert_close(own.pivots[name], found.pivots[name])


def test_few_rows_in_half_precision_do_not_tell_whether_the_mean_dominates():
    model = mlp(dtype=torch.bfloat16)
    assert not look(model, images(2, 6).bfloat16()).pivots
    many = look(model, images(64, 6).bfloat16() + torch.tensor([0, 300, 0, 0, 0, 0]).bfloat16())
    assert many.pivots["0"].nonzero().flatten().tolist() == [1]
