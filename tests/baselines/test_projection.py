"""Kodge et al.: W Pᵀ in every layer, from the statistics of the engine."""

from __future__ import annotations

import pytest
import torch

import unmerge
from networks import batched, conv1d_net, convolution_net, mlp, request
from unmerge.baselines import BaselineError, kodge
from unmerge.errors import DataError, StatisticsError

forget, retain = request((5,), each=6)
images = request((4, 6, 7), each=6)


def literal_projection(weight, forget_rows, retain_rows, forget_scale, retain_scale):
    """W (I − (M_F − M_F M_R))ᵀ from the singular vectors of the rows themselves."""

    def matrix(rows, scale):
        _, singular, basis = torch.linalg.svd(rows, full_matrices=False)
        share = singular**2 / (singular**2).sum()
        return basis.T @ torch.diag(scale * share / ((scale - 1) * share + 1)) @ basis

    of_forget, of_retain = matrix(forget_rows, forget_scale), matrix(retain_rows, retain_scale)
    projection = torch.eye(weight.shape[1], dtype=weight.dtype) - (of_forget - of_forget @ of_retain)
    return weight @ projection.T


def test_every_layer_of_a_network_is_projected_and_biases_stay():
    model = mlp((5, 7, 3))
    found = kodge(model, [forget], batched(retain, 5), retain_scales=[300], forget_scales=[10])
    inputs = [forget[0], retain[0]]
    for name in ("0", "2"):
        layer, changed = model.get_submodule(name), found.get_submodule(name)
        expected = literal_projection(layer.weight.detach(), *inputs, 10, 300)
        torch.testing.assert_close(changed.weight.detach(), expected, rtol=1e-9, atol=1e-9)
        assert changed.bias.equal(layer.bias)
        inputs = [torch.relu(layer(rows)).detach() for rows in inputs]


@pytest.mark.parametrize("kind", ["plain", "stride", "groups", "depthwise"])
def test_a_convolution_is_projected_per_group(kind):
    model = convolution_net(kind)
    found = kodge(model, [images[0]], [images[1]], retain_scales=[100], forget_scales=[3])
    conv = model.conv
    expected = conv.weight.detach().clone()
    with torch.no_grad():
        hidden = [torch.relu(model.stem(pool)) for pool, _ in images]
    channels = 4 // conv.groups
    for group in range(conv.groups):
        rows = []
        for values in hidden:
            part = values[:, group * channels : (group + 1) * channels]
            patches = torch.nn.functional.unfold(part, 3, padding=1, stride=conv.stride)
            rows.append(patches.transpose(1, 2).flatten(0, 1))
        own = slice(group * conv.out_channels // conv.groups, (group + 1) * conv.out_channels // conv.groups)
        matrix = literal_projection(expected[own].flatten(1), *rows, 3, 100)
        expected[own] = matrix.reshape(expected[own].shape)
    torch.testing.assert_close(found.conv.weight.detach(), expected, rtol=1e-8, atol=1e-8)
    assert found.conv.bias.equal(conv.bias)


def test_a_transposed_layer_keeps_its_layout():
    model = conv1d_net(5, 7, 3)
    found = kodge(model, [forget], [retain], retain_scales=[100], forget_scales=[10])
    expected = literal_projection(model[0].weight.detach().T, forget[0], retain[0], 10, 100)
    torch.testing.assert_close(found[0].weight.detach(), expected.T, rtol=1e-9, atol=1e-9)


def test_the_best_pair_of_scales_is_taken():
    model = mlp((5, 7, 3))
    trace = []
    found = kodge(model, [forget], [retain], trace=trace)
    assert len(trace) == 16
    assert trace[1].settings == {"retain_scale": 100.0, "forget_scale": 10.0}
    best = max(trace, key=lambda candidate: candidate.score)
    scales = {f"{name}s": [value] for name, value in best.settings.items()}
    alone = kodge(model, [forget], [retain], **scales)
    assert all(a.equal(b) for a, b in zip(found.parameters(), alone.parameters(), strict=True))
    shares = [(found(inputs).argmax(1) == labels).double().mean().item() for inputs, labels in (forget, retain)]
    assert (best.forget_accuracy, best.retain_accuracy) == pytest.approx(tuple(shares))


def test_statistics_can_be_shared_with_the_engine():
    model = mlp((5, 7, 3))
    whole = unmerge.collect(model, [forget, retain])
    of_forget = unmerge.collect(model, [forget], whole)
    shared = kodge(model, [forget], [retain], statistics=(of_forget, whole - of_forget))
    alone = kodge(model, [forget], [retain])
    for a, b in zip(shared.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a, b)

    head = unmerge.collect(model, [forget], ["2"])
    only_head = kodge(model, [forget], [retain], statistics=(head, unmerge.collect(model, [retain], head)))
    assert only_head[0].weight.equal(model[0].weight)
    assert not only_head[2].weight.equal(model[2].weight)


def test_a_limit_draws_from_the_whole_pool():
    seen = []

    def forward(model, batch):
        seen.append(batch[0])
        return model(batch[0])

    kodge(mlp((5, 7, 3)), batched(forget, 2), batched(retain, 2), samples=5, forward=forward)
    read = torch.cat(seen).unique(dim=0)
    assert len(read) <= 5 + 5 + 2  # and what the first look at the network takes


def test_wrong_scales_and_statistics_are_named():
    model = mlp((5, 7, 3))
    for scales in ([], "100", [0], 5):
        with pytest.raises(BaselineError, match="retain_scales="):
            kodge(model, [forget], [retain], retain_scales=scales)
    of_forget = unmerge.collect(model, [forget])
    with pytest.raises(DataError, match="pair of Statistics"):
        kodge(model, [forget], [retain], statistics=of_forget)
    with pytest.raises(StatisticsError, match="other weights"):
        kodge(mlp((5, 7, 3), seed=1), [forget], [retain], statistics=(of_forget, of_forget))
    with pytest.raises(BaselineError, match="samples=0"):
        kodge(model, [forget], [retain], samples=0)
