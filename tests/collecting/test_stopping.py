"""Passes that end behind the last wanted block, and those that may not."""

import gc
import weakref

import pytest
import torch
from torch import nn

from decoders import decoder, padded, sentences
from unmerge import collect


def counted(model, *names):
    calls = dict.fromkeys(names, 0)
    for name in names:
        model.get_submodule(name).register_forward_hook(lambda *_, name=name: calls.update({name: calls[name] + 1}))
    return calls


def data():
    return [padded(sentences((4, 6), seed)) for seed in range(4)]


def statistics_of(layers, **options):
    model = decoder("llama")
    calls = counted(model, "model.layers.0", "model.layers.2", "lm_head")
    found = collect(model, data(), layers, **options)
    return found, calls


def test_later_batches_end_behind_the_last_block():
    found, calls = statistics_of("re:layers.1.mlp")
    # The first look, of two samples and of one, and the first batch are whole.
    assert calls == {"model.layers.0": 6, "model.layers.2": 3, "lm_head": 3}
    assert found["model.layers.1.mlp.up_proj"].moments.n == 40


def test_a_layer_outside_the_blocks_needs_whole_passes():
    _, calls = statistics_of(["model.layers.0.mlp.up_proj", "lm_head"])
    assert calls["lm_head"] == 6


def test_what_is_caught_on_the_way_does_not_hide_the_end():
    model = decoder("llama")

    def forward(model, batch):
        try:
            return model(**batch)
        except Exception:
            pytest.fail("a pass that ends early was taken for an error")

    expected = collect(model, data(), "mlp:last2")
    found = collect(model, data(), "mlp:last2", forward=forward)
    for name, layer in expected.layers.items():
        torch.testing.assert_close(found[name].moments.scatter, layer.moments.scatter)


@pytest.mark.parametrize("held_by", ["a wrapper", "a closure"])
def test_a_pass_that_ends_early_leaves_no_activations_behind(held_by: str):
    model, activations = decoder("llama"), []

    def forward(model, batch):
        hidden, raised = torch.zeros(1000), []
        activations.append(weakref.ref(hidden))

        def inner():  # whose frame, as long as there is one, has what it closes over, as that of a module's call has
            return model(**batch) if held_by == "a wrapper" or hidden.numel() else None

        try:
            return inner()
        except BaseException as error:
            if held_by == "a wrapper":
                raised.append((error, raised))  # a cycle: the error knows this frame, and this frame the error
            raise

    gc.disable()  # which would come late: it counts objects, not their size
    try:
        collect(model, data(), "re:layers.1.mlp", forward=forward)
        assert len(activations) == 6
        assert [place for place, hidden in enumerate(activations) if hidden() is not None] == []
    finally:
        gc.enable()


def test_what_ends_a_pass_lets_go_of_its_frames():
    raised = []

    def forward(model, batch):
        try:
            return model(**batch)
        except BaseException as error:
            raised.append(error)
            raise

    collect(decoder("llama"), data(), "re:layers.1.mlp", forward=forward)
    assert raised
    assert all(error.__traceback__ is None for error in raised)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)

    def forward(self, hidden):
        return hidden + self.fc(hidden)


class Backwards(nn.Module):
    """Runs its blocks from the last to the first, or in order and over again."""

    def __init__(self, order):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.order = order

    def forward(self, hidden):
        for place in self.order:
            hidden = self.blocks[place](hidden)
        return hidden


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2, 0, 1, 2)])
def test_blocks_in_another_order_or_called_again_are_read_to_the_end(order):
    torch.manual_seed(0)
    model = Backwards(order).eval()
    inputs = torch.randn(3, 4, 5, 3)
    found = collect(model, list(inputs), "last3")
    assert {layer.moments.n for layer in found.layers.values()} == {60 * len(order) // 3}
