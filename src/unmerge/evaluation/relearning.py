"""How fast fine-tuning on the forget split brings it back."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.data.batches import Forward, feed, first_tensor, labels_of, logits_of, map_tensors, on_device
from unmerge.data.reading import all_batches
from unmerge.errors import DataError
from unmerge.evaluation.bootstrap import resampled_means, with_interval
from unmerge.evaluation.result import Better, Column, Row
from unmerge.evaluation.subject import NO_REFERENCE, Findings, NotMeasurable, Setting, Subject
from unmerge.model.layers import candidates
from unmerge.placement.sharded import is_sharded

STEPS = (0, 1, 2, 5, 10, 20)
RATE = 0.01
BATCH_SIZE = 128
MAX_SAMPLES = 1000
_REMOVED = -1e3  # a bias below this is that of a removed row
Curve = dict[int, Tensor]


def relearn(
    model: nn.Module,
    samples: Any,
    steps: Sequence[int] = STEPS,
    rate: float = RATE,
    batch_size: int = BATCH_SIZE,
    forward: Forward | None = None,
    seed: int = 0,
) -> Curve:
    """Whether a copy of the model is right on each sample (one batch) after so many steps of SGD on them.

    Momentum 0.9, BatchNorm statistics and dropout as in evaluation, so that only the weights answer. A head row
    that was removed (bias −1e4) could not come back in any number of small steps, which says nothing of what
    the network knows: it starts with the mean bias of the others, as anyone who wants the class back would do.
    """
    student = copy.deepcopy(model).eval().requires_grad_(True)
    _restore_removed_rows(student)
    optimizer = torch.optim.SGD(student.parameters(), lr=rate, momentum=0.9)
    generator = torch.Generator().manual_seed(seed)
    size = len(first_tensor(samples))
    queue: list[Tensor] = []
    curve: Curve = {}
    devices = sorted({value.device.index for value in model.parameters() if value.is_cuda})
    with torch.random.fork_rng(devices=devices), torch.inference_mode(False), torch.enable_grad():
        for step in range(max(steps) + 1):
            if step in steps:
                curve[step] = _right(student, samples, batch_size, forward)
            if step < max(steps):
                queue = queue or list(torch.randperm(size, generator=generator).split(batch_size))
                logits, labels = _answers(student, _taken(samples, queue.pop(), size), forward)
                optimizer.zero_grad()
                nn.functional.cross_entropy(logits, labels).backward()
                optimizer.step()
    return curve


def pooled(data: Any, what: str = "forget") -> Any:
    """All batches of a split as one."""
    return _joined(all_batches(data, what))


def observe(
    subject: Subject,
    setting: Setting,
    steps: Sequence[int] = STEPS,
    rate: float = RATE,
    batch_size: int = BATCH_SIZE,
    max_samples: int = MAX_SAMPLES,
) -> Curve:
    """The curve on at most `max_samples` forget samples, drawn by the seed."""
    if subject.module is None:
        raise NotMeasurable("only outputs were given; pass the model itself")
    if is_sharded(subject.module):
        raise NotMeasurable("the model is spread over processes, and a copy of it would be needed")
    if "forget" not in setting.splits:
        raise NotMeasurable("it needs the forget split")
    samples = pooled(setting.splits["forget"])
    size = len(first_tensor(samples))
    chosen = torch.randperm(size, generator=torch.Generator().manual_seed(setting.seed))[:max_samples]
    some = _taken(samples, chosen, size)
    if _is_masked(subject.module, _taken(samples, chosen[:batch_size], size), setting.forward):
        raise NotMeasurable("a mask outside the network holds these classes' logits, which no training brings back")
    return relearn(subject.module, some, steps, rate, batch_size, setting.forward, setting.seed)


def compare(own: Curve, retrained: Curve | None, setting: Setting) -> Findings:
    """Accuracy after each number of steps, and the mean gap of the curve to the retrained model's."""
    findings = Findings()
    near: Better | None = None if retrained is None else "near"
    other = own if retrained is None else retrained
    row: Row = {}
    values, draws = [], []
    drawn = resampled_means([*own.values(), *other.values()], setting.draws, setting.seed)
    for place, (step, right) in enumerate(own.items()):
        value = right.double().mean().item()
        row[Column(f"after {step}", near, 2, True)] = with_interval(value, drawn[place], setting.level)
        values.append(abs(value - other[step].double().mean().item()))
        draws.append(abs(drawn[place] - drawn[len(own) + place]))
    if retrained is None:
        findings.missing["mean gap"] = NO_REFERENCE
    else:
        gap = with_interval(sum(values) / len(values), sum(draws) / len(draws), setting.level)
        row[Column("mean gap", "lower", 2, True)] = gap
    findings.rows["relearning"] = row
    return findings


def _restore_removed_rows(model: nn.Module) -> None:
    for module in candidates(model).values():
        bias = getattr(module, "bias", None)
        if isinstance(bias, Tensor) and (removed := bias.detach() < _REMOVED).any() and not removed.all():
            with torch.no_grad():
                bias[removed] = bias[~removed].mean()


@torch.no_grad()
def _is_masked(model: nn.Module, samples: Any, forward: Forward | None) -> bool:
    """Whether the right logits stay far below all others also when removed rows of the head are back."""
    student = copy.deepcopy(model).eval()
    _restore_removed_rows(student)
    logits, labels = _answers(student, samples, forward)
    return bool((logits.gather(1, labels.unsqueeze(1)) < _REMOVED).all())


def _right(model: nn.Module, samples: Any, batch_size: int, forward: Forward | None) -> Tensor:
    size = len(first_tensor(samples))
    found = []
    with torch.no_grad():
        for rows in torch.arange(size).split(batch_size):
            logits, labels = _answers(model, _taken(samples, rows, size), forward)
            found.append((logits.argmax(1) == labels).cpu())
    return torch.cat(found)


def _answers(model: nn.Module, batch: Any, forward: Forward | None) -> tuple[Tensor, Tensor]:
    batch = on_device(model, batch)
    logits, labels = logits_of(feed(model, batch, forward)), labels_of(batch)
    if logits is None or labels is None:
        raise DataError("relearning needs batches with class labels and a model that returns logits.")
    return logits.float(), labels.long()


def _taken(batch: Any, rows: Tensor, size: int) -> Any:
    return map_tensors(
        batch, lambda tensor: tensor[rows.to(tensor.device)] if tensor.dim() and len(tensor) == size else tensor
    )


def _joined(parts: list[Any]) -> Any:
    """Batches of one structure as one batch."""
    first = parts[0]
    if isinstance(first, Tensor):
        if not first.dim():
            return first
        if any(part.shape[1:] != first.shape[1:] for part in parts):
            raise NotMeasurable("the forget batches have samples of different shapes")
        return torch.cat(parts)
    if isinstance(first, Mapping):
        return {key: _joined([part[key] for part in parts]) for key in first}
    if isinstance(first, (tuple, list)):
        return [_joined([part[place] for part in parts]) for place in range(len(first))]
    return first
