"""Language models on a GPU: half precision, statistics that go to the CPU in parts, fused experts."""

import pytest
import torch

from decoders import decoder, padded, sentences
from unmerge import Recipe, collect, fit, plan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def data():
    forget = [padded(sentences((9, 8, 7, 9), seed, 3, 12)) for seed in range(6)]
    return forget, [padded(sentences((6, 9, 7, 8), 10 + seed, 9, 23)) for seed in range(6)]


def on_gpu(kind, dtype=torch.bfloat16):
    return decoder(kind, blocks=4, dtype=dtype, hidden_size=64, intermediate_size=96).cuda()


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_statistics_in_parts_are_those_at_once_and_on_the_cpu(kind):
    model, (forget, _) = on_gpu(kind), data()
    whole = collect(model, forget, "mlp")
    found = collect(model, forget, "mlp", memory="60KB")
    assert all(layer.device == torch.device("cpu") for layer in found.layers.values())
    assert found.layers.keys() == whole.layers.keys()
    for name, layer in whole.layers.items():
        assert found[name].moments.n == layer.moments.n
        torch.testing.assert_close(found[name].moments.scatter, layer.moments.scatter.cpu(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_an_edit_from_statistics_on_the_cpu_is_that_of_the_data(kind):
    model, (forget, retain) = on_gpu(kind, torch.float32), data()
    recipe = Recipe(layers="mlp:last2", rank=4, retain_rank=4)
    options = {"init": "zero", "recipe": recipe, "on_verdict": "ignore"}
    expected = fit(model, forget, retain, **options)
    sides = [collect(model, side, "mlp:last2", memory="60KB") for side in (forget, retain)]
    for sources in ((forget, retain), sides):
        found = fit(model, *sources, memory="4MB", **options)
        assert found.layers.keys() == expected.layers.keys()
        for name, layer in expected.layers.items():
            other = found.layers[name]
            assert other.B.is_cuda
            torch.testing.assert_close(other.B @ other.Q.T, layer.B @ layer.Q.T, rtol=1e-2, atol=1e-3)


def test_the_bound_holds_on_the_device():
    model = decoder("llama", blocks=4, dtype=torch.bfloat16, hidden_size=512, intermediate_size=2048).cuda()
    forget, retain = data()
    recipe = Recipe(layers="mlp")
    whole = plan(model, recipe, None, forget)
    alone = max(cost.bytes for group in whole.groups for cost in group.costs)
    bound = (alone + whole.bytes) // 2  # enough for each layer, not for all at once
    options = {"init": "zero", "recipe": recipe, "memory": bound, "on_verdict": "ignore"}
    fit(model, forget, retain, **options)  # libraries are loaded
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    edit = fit(model, forget, retain, **options)
    assert len(edit.provenance["plan"]["passes"]) > 1
    assert torch.cuda.max_memory_allocated() - before < 1.2 * bound
