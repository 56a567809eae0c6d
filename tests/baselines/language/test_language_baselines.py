"""GradDiff, NPO and RMU make the step that their formulas say, and leave the given model alone."""

from __future__ import annotations

import pytest
import torch

from language import byte_tokenizer, questions, tiny_llama
from unmerge.baselines import BaselineError
from unmerge.baselines.language import METHODS, LanguageTraining, grad_diff, npo, rmu
from unmerge.baselines.language.training import train
from unmerge.errors import DataError
from unmerge.evaluation.language import encode, padded

tokenizer = byte_tokenizer()
RATE, DECAY = 1e-3, 0.1
ONE_STEP = {"epochs": 1, "lr": RATE, "weight_decay": DECAY, "warmup": 0.0, "max_norm": 1e9}


def batches_of(count, about="author", size=8):
    encoded = encode(tokenizer, [(entry.question, entry.answer) for entry in questions(count, about=about)])
    return [padded(encoded[start : start + size]) for start in range(0, count, size)]


forget = batches_of(2)
kept = batches_of(1, "writer")  # one sequence, so that every draw of retain is it
both = {name: torch.cat([tensor, tensor]) for name, tensor in kept[0].items()}


def log_probs(model, batch):
    """log p of each token but the first, and where it has a label."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    logits = logits - logits.exp().sum(-1, keepdim=True).log()
    labels = batch["labels"][:, 1:]
    return logits.gather(2, labels.clamp_min(0).unsqueeze(2))[..., 0], (labels != -100).double()


def cross_entropy(model, batch):
    values, mask = log_probs(model, batch)
    return -(values * mask).sum() / mask.sum()


def stepped(model, loss, rates=(RATE,)):
    """The weights after some steps of AdamW, written out; a weight without a gradient stays."""
    first, second = {}, {}
    for count, rate in enumerate(rates, 1):
        model.zero_grad()
        loss(model).backward()
        for name, weight in model.named_parameters():
            if weight.grad is None:
                continue
            first[name] = 0.9 * first.get(name, 0) + 0.1 * weight.grad
            second[name] = 0.999 * second.get(name, 0) + 0.001 * weight.grad**2
            direction = first[name] / (1 - 0.9**count) / ((second[name] / (1 - 0.999**count)).sqrt() + 1e-8)
            decay = 1 - rate * DECAY if weight.dim() > 1 else 1
            weight.data = weight.data * decay - rate * direction
    return {name: weight.detach() for name, weight in model.named_parameters()}


def agree(found, expected):
    for name, weight in found.named_parameters():
        torch.testing.assert_close(weight.detach(), expected[name], rtol=1e-7, atol=1e-7, msg=name)


def test_graddiff_ascends_on_forget_and_descends_on_retain():
    found = grad_diff(tiny_llama(double=True), forget, kept, **ONE_STEP)
    agree(
        found,
        stepped(tiny_llama(double=True), lambda model: cross_entropy(model, both) - cross_entropy(model, forget[0])),
    )


@pytest.mark.parametrize("beta", [0.1, 2.0])
def test_npo_lowers_the_summed_log_probability_against_the_model_as_given(beta):
    """Two steps: in the second the model is no longer its own reference."""
    reference = tiny_llama(double=True)

    def loss(model):
        own, mask = log_probs(model, forget[0])
        before = log_probs(reference, forget[0])[0].detach()
        ratio = ((own - before) * mask).sum(1)
        return -2 / beta * torch.log(1 / (1 + torch.exp(beta * ratio))).mean() + cross_entropy(model, both)

    found = npo(reference, forget, kept, beta=beta, **ONE_STEP | {"epochs": 2})
    agree(found, stepped(tiny_llama(double=True), loss, (RATE, RATE / 2)))


def test_rmu_steers_forget_tokens_and_holds_retain_tokens():
    reference = tiny_llama(layers=3, double=True)

    def hidden(model, batch):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        return model(**inputs, output_hidden_states=True).hidden_states[2]  # after layer 1

    def error(found, target, batch):
        total = 0.0
        for row, labels in enumerate(batch["labels"]):
            places = (labels != -100).nonzero()[:, 0]
            goal = target if target.dim() == 1 else target[row, places]
            total = total + ((found[row, places] - goal) ** 2).mean() / len(batch["labels"])
        return total

    direction = torch.rand(16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    control = 3.0 * direction / direction.norm()

    def loss(model):
        before = hidden(reference, both).detach()
        return error(hidden(model, forget[0]), control, forget[0]) + error(hidden(model, both), before, both)

    found = rmu(tiny_llama(layers=3, double=True), forget, kept, layer=1, steering=3.0, **ONE_STEP)
    agree(found, stepped(tiny_llama(layers=3, double=True), loss))
    assert torch.equal(found.model.layers[2].mlp.up_proj.weight, reference.model.layers[2].mlp.up_proj.weight)


@pytest.mark.parametrize("name", METHODS)
def test_the_given_model_and_the_random_state_are_as_before(name):
    model = tiny_llama()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    options = {"layer": 1} if name == "rmu" else {}
    found = METHODS[name](model, batches_of(5), batches_of(7, "writer"), epochs=2, batch_size=2, lr=1e-3, **options)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in (*model.parameters(), *found.parameters()))
    assert not torch.equal(found.model.layers[0].mlp.up_proj.weight, before["model.layers.0.mlp.up_proj.weight"])
    assert found.model.embed_tokens.weight is found.lm_head.weight


@pytest.mark.parametrize("autocast", [False, True])
def test_forgetting_makes_the_answers_less_likely(autocast):
    model = tiny_llama()
    found = npo(model, batches_of(4), batches_of(4, "writer"), epochs=10, lr=3e-3, autocast=autocast)
    before, after = (cross_entropy(which, batches_of(4)[0]).item() for which in (model, found))
    assert after > before + 0.1


def test_padding_changes_nothing():
    model = tiny_llama(double=True)
    wide = [{name: torch.nn.functional.pad(tensor, (0, 3), value=-100 if name == "labels" else 0)
             for name, tensor in forget[0].items()}]  # fmt: skip
    agree(grad_diff(model, wide, kept, **ONE_STEP), dict(grad_diff(model, forget, kept, **ONE_STEP).named_parameters()))


def test_every_forget_sequence_comes_once_an_epoch_with_a_retain_one():
    seen = []

    class Watched(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = tiny_llama()

        def forward(self, input_ids):
            seen.append((len(input_ids), int((input_ids != 0).sum())))
            return self.inner(input_ids=input_ids)

    grad_diff(Watched(), batches_of(5), batches_of(9, "writer"), epochs=2, batch_size=2)
    assert [count for count, _ in seen] == [2, 2, 2, 2, 1, 1] * 2
    lost = [tokens for place, (_, tokens) in enumerate(seen) if place % 2]  # retain is read first
    assert sum(lost) == 2 * sum(int((batch["input_ids"] != 0).sum()) for batch in batches_of(5))


def test_the_rate_rises_in_the_first_epoch_and_falls_to_zero():
    training = LanguageTraining(epochs=3, lr=1.0, warmup=1.0)
    assert [training.rate(done, 2) for done in range(6)] == pytest.approx([0.5, 1, 1, 0.75, 0.5, 0.25])
    assert [LanguageTraining(epochs=2, lr=1.0, warmup=0.0).rate(done, 1) for done in range(2)] == [1.0, 0.5]


def test_gradients_are_clipped_together():
    model = torch.nn.Linear(2, 1, bias=False).double()
    model.weight.data = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    seen = []

    def epoch(generator):
        yield (model.weight * torch.tensor([30.0, 40.0])).sum()
        seen.append(model.weight.grad.clone())

    train(model, epoch, 1, LanguageTraining(epochs=1, max_norm=2.0), "test")
    assert seen[0].tolist()[0] == pytest.approx([1.2, 1.6])


def test_wrong_input_is_named():
    model = tiny_llama()
    with pytest.raises(BaselineError, match="no option 'learning_rate'"):
        grad_diff(model, forget, kept, learning_rate=1)
    with pytest.raises(BaselineError, match=r"layer=7 does not exist: the model has 2"):
        rmu(model, forget, kept)
    with pytest.raises(BaselineError, match="beta=0"):
        npo(model, forget, kept, beta=0)
    with pytest.raises(DataError, match=r"forget: a batch is .*expected a mapping with input_ids and labels"):
        grad_diff(model, [{"input_ids": torch.zeros(2, 3), "labels": torch.zeros(2)}], kept)
    with pytest.raises(DataError, match="retain: sequence 0 has no label"):
        grad_diff(model, forget, [{**kept[0], "labels": torch.full_like(kept[0]["labels"], -100)}])
