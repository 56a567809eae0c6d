"""How close a model's answers and weights are to the retrained model's."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from unmerge.errors import InitError
from unmerge.evaluation.result import Column, Figure, Row
from unmerge.evaluation.subject import NO_REFERENCE, Findings, NotMeasurable, Setting, Subject
from unmerge.model.initial import initial_weights

FLOOR = -30.0  # the least log-probability of the retrained model: a class it has removed


def divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(p_UL ‖ p_RT) of each sample.

    Logits of removed classes are very negative (−1e4, −inf). In p_UL they count 0; in p_RT they are held at e⁻³⁰,
    so that a model that still believes in such a class is far off by a finite amount.
    """
    own = logits.double().log_softmax(1).clamp(min=-1e5)
    # Not above one's own, so that equal answers are exactly 0 apart.
    other = torch.maximum(reference.double().log_softmax(1), own.clamp(max=FLOOR))
    return (own.exp() * (own - other)).sum(1)


def task_vector_fidelity(
    weights: Mapping[str, Tensor], retrained: Mapping[str, Tensor], initial: Mapping[str, Tensor]
) -> tuple[float, float]:
    """The relative Frobenius error of the task vectors averaged over matrices, and their cosine weighted by size."""
    errors, cosines, sizes = [], [], []
    for name, goal in retrained.items():
        own, target = (value.double() - initial[name].double() for value in (weights[name], goal))
        lengths = own.norm() * target.norm()
        if target.norm() == 0:
            raise NotMeasurable(f"the retrained {name!r} equals its initial value, so no error is relative to it")
        errors.append((own - target).norm() / target.norm())
        cosines.append((own * target).sum() / lengths if lengths > 0 else torch.zeros_like(lengths))
        sizes.append(goal.numel())
    shares = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    return torch.stack(errors).mean().item(), (shares @ torch.stack(cosines).cpu()).item()


def observe(subject: Subject, setting: Setting) -> Subject:
    """The model itself: a divergence needs the answers of both at once."""
    return subject


def compare(own: Subject, retrained: Subject | None, setting: Setting) -> Findings:
    """Mean divergence per split and, with initial weights, the figures of the task vectors."""
    if retrained is None:
        raise NotMeasurable(NO_REFERENCE)
    findings = Findings()
    row: Row = {}
    for split, part in own.outputs.splits.items():
        if split not in retrained.outputs.splits:
            findings.missing[f"KL {split}"] = "the retrained model has no outputs on this split"
            continue
        value = divergence(part.logits, retrained.outputs.splits[split].logits).mean().item()
        row[Column(f"KL {split}", "lower")] = Figure(value)
    try:
        error, cosine = _weights_compared(own, retrained, setting)
        row |= {Column("relative error", "lower"): Figure(error), Column("cosine", "higher"): Figure(cosine)}
    except NotMeasurable as reason:
        findings.missing["task vectors"] = str(reason)
    findings.rows["fidelity"] = row
    return findings


def _weights_compared(subject: Subject, retrained: Subject, setting: Setting) -> tuple[float, float]:
    if setting.init is None:
        raise NotMeasurable('no initial weights were given; pass init="zero" or those fine-tuning started from')
    if subject.module is None or retrained.module is None:
        raise NotMeasurable("only outputs were given; pass the models themselves")
    goals = _matrices(retrained.module)
    weights = _matrices(subject.module)
    odd = [name for name, goal in goals.items() if name not in weights or weights[name].shape != goal.shape]
    if odd:
        raise NotMeasurable(f"the model has no matrix {odd[0]!r} of the retrained model's shape")
    try:
        initial = initial_weights(retrained.module, setting.init, goals)
    except InitError as error:
        raise NotMeasurable(str(error)) from error
    device = retrained.device
    return task_vector_fidelity({name: weights[name].to(device) for name in goals}, goals, initial)


def _matrices(module: nn.Module) -> dict[str, Tensor]:
    """Every weight with at least two dimensions."""
    return {name: value.detach() for name, value in module.named_parameters() if value.dim() > 1}
