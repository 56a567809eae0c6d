"""Every method on a GPU, with bfloat16 forward passes where it trains and with data on either side."""

from __future__ import annotations

import pytest
import torch

from language import byte_tokenizer, questions, tiny_llama
from unmerge.baselines import METHODS, salun
from unmerge.baselines.language import METHODS as LANGUAGE_METHODS
from unmerge.baselines.saliency import saliency_masks
from unmerge.baselines.samples import gather
from unmerge.baselines.training import Training
from unmerge.bench.digits import load_digits, train
from unmerge.evaluation.language import encode, padded
from unmerge.placement.state import state_of
from unmerge.storage.fingerprint import fingerprint

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

UNTRAINED = ("unedited", "logit_mask", "head_removal", "leace")
OPTIONS = {"retrain": {"epochs": 6, "batch_size": 64}}


@pytest.fixture(scope="module")
def request_on_gpu():
    images, _ = load_digits()
    model = train(images, epochs=10).cuda()
    pools = [[(part.images, part.labels)] for part in (images.only(3), images.without(3))]
    return model, *pools


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("hold", ["cuda", "cpu"])
def test_data_on_either_side_and_autocast(name, hold, request_on_gpu):
    model, *pools = request_on_gpu
    if hold == "cuda":
        pools = [[(images.cuda(), labels.cuda()) for images, labels in pool] for pool in pools]
    options = dict(OPTIONS.get(name, {}))
    if name not in UNTRAINED:
        options["autocast"] = True
        if name != "kodge":
            options["hold"] = "device" if hold == "cuda" else "cpu"
    before, random_state = fingerprint(state_of(model)), torch.cuda.get_rng_state()
    result = METHODS[name](model, *pools, **options)
    assert fingerprint(state_of(model)) == before
    assert torch.cuda.get_rng_state().equal(random_state)
    assert all(tensor.is_cuda for tensor in state_of(result).values())
    images, labels = pools[1][0]
    with torch.no_grad():
        assert (result(images.cuda()).argmax(1) == labels.cuda()).float().mean() > 0.9


def test_masked_weights_are_bit_identical(request_on_gpu):
    model, forget, retain = request_on_gpu
    result = salun(model, forget, retain, epochs=2, autocast=True)
    training = Training(epochs=1, lr=1, autocast=True)
    masks = saliency_masks(model, gather(model, forget), 0.5, training)
    after = dict(result.named_parameters())
    same = [
        (after[name].view(torch.int32) == weight.view(torch.int32))[~masks[name]].float().mean()
        for name, weight in model.named_parameters()
    ]
    # Gradients of two passes may differ in a last bit and move an entry over the edge of the mask.
    assert min(same) > 0.99


@pytest.mark.parametrize("name", LANGUAGE_METHODS)
def test_a_seed_gives_the_same_language_model_at_every_run(name):
    model = tiny_llama(layers=2).cuda()
    tokenizer = byte_tokenizer()
    pools = [
        [padded(encode(tokenizer, [(entry.question, entry.answer) for entry in questions(24, about=about)]))]
        for about in ("author", "writer")
    ]
    options = {"layer": 1} if name == "rmu" else {}
    first, second = (LANGUAGE_METHODS[name](model, *pools, lr=1e-3, epochs=3, **options) for _ in range(2))
    assert fingerprint(state_of(first)) == fingerprint(state_of(second)) != fingerprint(state_of(model))
