"""Every method, end to end: it forgets real digits, and leaves the model that it is given as it was."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
from torch import nn

from networks import batched, hf_resnet, hf_vit, request
from unmerge.baselines import METHODS
from unmerge.bench.digits import accuracy, load_digits, train
from unmerge.errors import DataError, UnmergeError
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import fingerprint

pytestmark = pytest.mark.parametrize("name", METHODS)

# What the paper's rates for CIFAR-100 are on a thousand small images, and no more epochs than it needs.
DIGITS = {
    "neggrad_plus": {"lr": 5e-3},
    "neg_tv": {"lr": 1e-2},
    "neg_merge": {"lr": 1e-2},
    "retrain": {"epochs": 6, "batch_size": 64},
}
# The most of the forgotten digit and the least of the others that is still known.
EXPECTED = {
    "unedited": (1.0, 0.99),
    "fine_tune": (1.0, 0.99),
    "logit_mask": (0.0, 0.99),
    "head_removal": (0.0, 0.99),
    "neggrad_plus": (0.1, 0.9),
    "random_label": (0.25, 0.98),
    "salun": (0.25, 0.98),
    "neg_tv": (0.3, 0.9),
    "neg_merge": (0.3, 0.9),
    "kodge": (0.05, 0.97),
    "leace": (0.05, 0.99),
    "retrain": (0.0, 0.97),
}
FEW = {"epochs": 1, "batch_size": 4}
SHORT = {
    "unedited": {},
    "logit_mask": {},
    "head_removal": {},
    "kodge": {"retain_scales": [100], "forget_scales": [10]},
    "leace": {},
}


@lru_cache(maxsize=1)
def digits() -> tuple[nn.Module, object, object]:
    images, _ = load_digits()
    return train(images, epochs=10), images.only(3), images.without(3)


def test_it_forgets_a_digit_and_leaves_the_model_as_it_was(name):
    model, forget, retain = digits()
    model.train()
    model[1].eval()
    before = fingerprint(state_of(model))
    flags = {name: module.training for name, module in model.named_modules()}
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    torch.manual_seed(7)
    random_state = torch.get_rng_state()
    result = METHODS[name](model, forget.loader(), retain.loader(), **DIGITS.get(name, {}))

    assert fingerprint(state_of(model)) == before
    assert {name: module.training for name, module in model.named_modules()} == flags
    assert torch.get_rng_state().equal(random_state)
    assert all(parameter.grad.equal(grad) for parameter, grad in zip(model.parameters(), gradients, strict=True))
    assert all(parameter.grad is None for parameter in result.parameters())
    own = {tensor.data_ptr() for tensor in state_of(model).values()}
    assert not own & {tensor.data_ptr() for tensor in state_of(result).values()}
    # A `LogitMask` adds itself in front.
    assert (
        flags.items() <= {name.removeprefix("model."): part.training for name, part in result.named_modules()}.items()
    )

    result.eval()
    most, least = EXPECTED[name]
    assert accuracy(result, forget) <= most
    assert accuracy(result, retain) >= least
    if name in ("unedited", "fine_tune"):
        assert accuracy(result, forget) > 0.9


def test_the_seed_decides(name):
    model, forget, retain = digits()
    model.eval()
    pools = [forget.images[:8], forget.labels[:8]], [retain.images[:24], retain.labels[:24]]
    options = SHORT.get(name, FEW)
    first, again = (METHODS[name](model, *([pool] for pool in pools), seed=3, **options) for _ in range(2))
    assert fingerprint(state_of(first)) == fingerprint(state_of(again))


@pytest.mark.parametrize("network", [hf_vit, hf_resnet])
def test_transformers_models_take_mappings(name, network):
    model = network(dtype=torch.float32)
    pools = request((3, 8, 8) if network is hf_vit else (3, 32, 32), each=4, dtype=torch.float32)
    data = [[{"pixel_values": images, "labels": labels} for images, labels in batched(pool, 3)] for pool in pools]
    before = fingerprint(state_of(model))
    options = dict(SHORT.get(name, FEW))
    if name == "retrain":
        options["init"] = network(dtype=torch.float32, seed=1)
    result = METHODS[name](model, *data, **options)
    assert fingerprint(state_of(model)) == before
    output = result(pixel_values=pools[0][0])
    assert type(output) is type(model(pixel_values=pools[0][0]))
    assert output.logits.isfinite().all()
    # The same data as tuples, fed by a function.
    fed = METHODS[name](
        model,
        *(batched(pool, 3) for pool in pools),
        forward=lambda model, batch: model(pixel_values=batch[0]).logits,
        **options,
    )
    assert all(a.equal(b) for a, b in zip(result.parameters(), fed.parameters(), strict=True))


def test_data_without_labels_or_without_samples_are_refused(name):
    if name == "unedited":
        pytest.skip("reads no data")
    model = hf_vit(dtype=torch.float32)
    forget, retain = request((3, 8, 8), each=2, dtype=torch.float32)
    options = SHORT.get(name, FEW)
    with pytest.raises(UnmergeError, match="no class labels"):
        METHODS[name](model, [forget[0]], [retain[0]], **options | _fresh(name))
    with pytest.raises(DataError, match="gave no batch"):
        METHODS[name](model, [], [], **options | _fresh(name))


def _fresh(name):
    return {"init": hf_vit(dtype=torch.float32, seed=1)} if name == "retrain" else {}
