"""The logit mask hides classes in any form of output and changes nothing else."""

from __future__ import annotations

from collections import namedtuple

import pytest
import torch
from torch import nn

from networks import hf_vit, mlp, request
from unmerge.baselines import LogitMask, logit_mask
from unmerge.errors import DataError

forget, retain = request((5,), each=4)
Output = namedtuple("Output", ["scores", "hidden"])


class Returning(nn.Module):
    """A network that returns its logits in a given form."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form = mlp((5, 7, 3)), form

    def forward(self, inputs):
        return self.form(self.net(inputs))


@pytest.mark.parametrize(
    ("form", "logits"),
    [
        (lambda logits: logits, lambda output: output),
        (lambda logits: (logits, "more"), lambda output: output[0]),
        (lambda logits: [logits, "more"], lambda output: output[0]),
        (lambda logits: Output(logits, "more"), lambda output: output.scores),
        (lambda logits: {"logits": logits, "hidden": "more"}, lambda output: output["logits"]),
    ],
)
def test_the_output_keeps_its_form(form, logits):
    model = Returning(form)
    masked = logit_mask(model, [forget], [retain])
    before, after = model(forget[0]), masked(forget[0])
    assert type(after) is type(before)
    assert (logits(after)[:, 0] == -1e4).all()
    assert logits(after)[:, 1:].equal(logits(before)[:, 1:])


def test_a_transformers_output_keeps_its_other_fields():
    model = hf_vit()
    pools = request((3, 8, 8), each=4)
    masked = logit_mask(model, [pools[0]], [pools[1]])
    images = pools[0][0]
    before, after = model(images, output_hidden_states=True), masked(pixel_values=images, output_hidden_states=True)
    assert type(after) is type(before)
    assert after["logits"] is after.logits
    assert (after.logits[:, 0] == -1e4).all()
    assert after.logits[:, 1:].equal(before.logits[:, 1:])
    assert len(after.hidden_states) == len(before.hidden_states)


def test_gradients_reach_the_model_through_the_classes_that_stay():
    masked = LogitMask(mlp((5, 7, 3)), [1])
    masked(forget[0]).sum().backward()
    assert (masked.model[2].bias.grad != 0).tolist() == [True, False, True]


def test_the_mask_stays_low_in_half_precision_and_moves_with_the_model():
    masked = logit_mask(mlp((5, 7, 3)), [forget], [retain]).half()
    assert masked.classes.dtype == torch.int64
    assert masked(forget[0].half())[:, 0].isfinite().all()
    assert list(masked.state_dict()) == [f"model.{name}" for name in mlp((5, 7, 3)).state_dict()]


def test_named_classes_need_no_retain_data():
    masked = logit_mask(mlp((5, 7, 3)), [forget], classes=[2, 1, 2])
    assert masked.classes.tolist() == [1, 2]


def test_classes_that_cannot_be_masked():
    model = mlp((5, 7, 3))
    with pytest.raises(DataError, match="all 3 classes"):
        logit_mask(model, [forget], classes=[0, 1, 2])
    with pytest.raises(DataError, match="every forget class"):
        logit_mask(model, [retain], [forget, retain])
    with pytest.raises(DataError, match="retain is needed"):
        logit_mask(model, [forget])
    with pytest.raises(DataError, match="outside 0 to 2"):
        logit_mask(model, [forget], classes=[3])
    for classes in ([], "3", [0.5], 1, [True], torch.tensor(1)):
        with pytest.raises(DataError, match="not a list of labels"):
            logit_mask(model, [forget], classes=classes)
