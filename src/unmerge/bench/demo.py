"""Forget one digit, end to end: `python -m unmerge.bench.demo [--digit 3]`."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from copy import deepcopy

from torch import Tensor, nn

import unmerge
from unmerge.bench.digits import Split, accuracy, load_digits, train

ALPHAS = [step / 4 for step in range(1, 33)]
TARGET = 0.01  # forget accuracy at which the search for alpha stops


class LogitMask(nn.Module):
    """A model whose forgotten classes are never predicted: the control that changes no weight."""

    def __init__(self, model: nn.Module, classes: list[int]) -> None:
        super().__init__()
        self.model, self.classes = model, classes

    def forward(self, images: Tensor) -> Tensor:
        logits = self.model(images).clone()
        logits[:, self.classes] = -1e4
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--digit", type=int, default=3, choices=range(10), help="the digit to forget (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="seed of split and training (default: 0)")
    options = parser.parse_args()

    images, test = load_digits(options.seed)
    forget, retain = images.only(options.digit), images.without(options.digit)
    print(f"digits: forget {options.digit} ({len(forget.labels)} images), retain {len(retain.labels)}\n")

    model, training = _timed(lambda: train(images, options.seed))
    retrained, retraining = _timed(lambda: train(retain, options.seed))
    rows = {
        "un-edited": (model, 0.0),
        "retrained on retain": (retrained, retraining),
        "logit mask": (LogitMask(model, [options.digit]), 0.0),
        "unmerge": _timed(lambda: edited(model, forget, retain)),
        "unmerge, no row removed": _timed(lambda: edited(model, forget, retain, head="edit")),
    }

    reference = [accuracy(retrained, split) for split in (forget, retain, test)]
    print(f"{'':24}  forget  retain    test     ToW  seconds")
    for name, (candidate, seconds) in rows.items():
        shares = [accuracy(candidate, split) for split in (forget, retain, test)]
        columns = "  ".join(f"{100 * share:6.2f}" for share in shares)
        print(f"{name:24}  {columns}  {tug_of_war(shares, reference):6.4f}  {seconds:7.3f}")
    print(
        f"\nTraining took {training:.1f} s. ToW is the closeness of the three accuracies to those of the retrained"
        "\nmodel. A logit mask has it too: it hides the class and changes no feature."
    )


def edited(model: nn.Module, forget: Split, retain: Split, head: str = "auto") -> nn.Module:
    """A copy of the model that has forgotten, with the untuned recipe; alpha from training data where none is given."""
    batches = retain.loader()
    edit = unmerge.fit(model, forget.loader(), batches, init="zero", recipe=unmerge.Recipe(head=head))
    result = deepcopy(model)
    if edit.alpha is not None:
        edit.apply(result, recalibrate=batches)
        return result
    for alpha in ALPHAS:
        edit.apply(result, alpha, recalibrate=batches)
        if accuracy(result, forget) <= TARGET:
            break
        edit.revert(result)
    return result


def tug_of_war(shares: list[float], reference: list[float]) -> float:
    """The product of 1 − |accuracy − retrained accuracy| over the splits."""
    return math.prod(1 - abs(share - target) for share, target in zip(shares, reference, strict=True))


def _timed(work: Callable[[], nn.Module]) -> tuple[nn.Module, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


if __name__ == "__main__":
    main()
