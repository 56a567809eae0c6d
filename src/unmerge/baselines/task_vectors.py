"""Negated task vector (Ilharco et al., 2023): fine-tune on forget, then go the other way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from numbers import Real
from typing import Any

from torch import nn

from unmerge.baselines.copies import working_copy
from unmerge.baselines.options import BaselineError, check_name, check_number
from unmerge.baselines.samples import Data, Samples, gather
from unmerge.baselines.selection import Candidate, Judge, Weights
from unmerge.baselines.training import Training, check_finite, train_on
from unmerge.editing.recalibration import recalibrate
from unmerge.errors import DataError
from unmerge.model.evaluating import batch_norms
from unmerge.placement.state import state_of
from unmerge.placement.writing import write

ALPHAS = (0.25, 0.35, 0.5, 0.75, 1.0)  # the paper's sweep
BUFFERS = ("keep", "subtract", "recalibrate")


def neg_tv(
    model: nn.Module,
    forget: Data,
    retain: Data | None = None,
    *,
    alpha: float | Sequence[float] = ALPHAS,
    buffers: str = "keep",
    epochs: int = 5,
    lr: float = 1e-3,
    samples: int | None = 5000,
    trace: list[Candidate] | None = None,
    **options: Any,
) -> nn.Module:
    """A copy of the model at θ − α(θ_F − θ), θ_F fine-tuned on forget.

    alpha: the strength, or several of which the best on training data is taken.
    buffers: BatchNorm statistics "keep" the model's own: fine-tuning on forget alone measures other data, and the
        reverse of that measures none. "subtract" treats them as weights, as public code does, variances not below 0.
        "recalibrate" re-estimates them from retain.
    samples: so many retain samples, drawn at random, are used to choose alpha and to recalibrate; None: all.
    trace: a list to which every strength that was tried is added with its accuracies.
    options: the other fields of `Training`.
    """
    training = Training.of(options, epochs=epochs, lr=lr)
    alphas = strengths(alpha)
    with working_copy(model, training.seed) as result:
        held = held_samples(result, forget, retain, alphas, buffers, samples, training, trace)
        vector = forget_vector(result, held, training, buffers == "subtract")
        return subtracted(result, vector, held, alphas, buffers, training, "NegTV", trace)


def forget_vector(model: nn.Module, samples: Samples, training: Training, with_buffers: bool) -> Weights:
    """θ_F − θ of every parameter, and of floating-point buffers where asked for."""
    tuned = train_on(deepcopy(model), samples, samples.forget, training, "fine-tune on forget")
    names = [name for name, _ in model.named_parameters()]
    if with_buffers:
        names += [name for name, buffer in model.named_buffers() if buffer.is_floating_point()]
    before, after = state_of(model), state_of(tuned)
    return {name: (after[name] - before[name]).detach() for name in names}


def subtracted(
    model: nn.Module,
    vector: Weights,
    samples: Samples,
    alphas: Sequence[float],
    buffers: str,
    training: Training,
    what: str,
    trace: list[Candidate] | None,
) -> nn.Module:
    """The model, changed in place to θ − α·vector with the best of the strengths."""
    state = {name: tensor.detach().clone() for name, tensor in state_of(model).items()}
    norms = list(batch_norms(model)) if buffers == "recalibrate" else []

    def candidates() -> Iterator[tuple[dict[str, float], Weights]]:
        for alpha in alphas:
            weights = {name: state[name].sub(change, alpha=alpha) for name, change in vector.items()}
            for name in weights:
                if name.endswith("running_var"):
                    weights[name].clamp_(min=0)
            if norms:
                write(model, weights)
                batches = [samples.take(chosen)[0] for chosen in samples.batches(samples.retain, training.batch_size)]
                recalibrate(model, norms, batches, training.forward)
                weights |= {name: buffer.clone() for name, buffer in model.named_buffers()}
            yield {"alpha": alpha}, weights

    if len(alphas) == 1 and trace is None:
        write(model, next(candidates())[1])
    else:
        judge = Judge(samples, training.batch_size, training.forward, training.autocast)
        judge.choose(model, candidates(), len(alphas), what, trace)
    check_finite(model, what)
    return model


def strengths(alpha: float | Sequence[float]) -> list[float]:
    """The strengths to try."""
    alphas = [alpha] if isinstance(alpha, Real) else alpha
    if not isinstance(alphas, Sequence) or isinstance(alphas, str) or not alphas:
        raise BaselineError(f"alpha={alpha!r} is not a number from 0 or a list of them, for example {list(ALPHAS)}.")
    for value in alphas:
        check_number("alpha", value, 0)
    return [float(value) for value in alphas]


def held_samples(
    model: nn.Module,
    forget: Data,
    retain: Data | None,
    alphas: Sequence[float],
    buffers: str,
    samples: int | None,
    training: Training,
    trace: list[Candidate] | None,
) -> Samples:
    """All of forget, and of retain what choosing a strength or recalibrating needs."""
    check_name("buffers", buffers, BUFFERS)
    needed = len(alphas) > 1 or trace is not None or buffers == "recalibrate"
    if needed and retain is None:
        raise DataError("retain is needed to choose alpha and to recalibrate. Pass it, or one alpha= and no trace=.")
    return gather(
        model,
        forget,
        retain if needed else None,
        forward=training.forward,
        hold=training.hold,
        retain_limit=samples,
        seed=training.seed,
    )
