"""What a model answers on each split: logits, labels and penultimate features, kept in memory or in one file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from unmerge.distributed.processes import is_first
from unmerge.distributed.warning import warn
from unmerge.errors import DataError, FileError, listing, suggest
from unmerge.evaluation.samples import alignment
from unmerge.storage.files import read_tensors, write_tensors
from unmerge.storage.forms import check_fields

_KIND = "evaluation outputs"
_HALF = torch.float16


@dataclass(frozen=True)
class SplitOutputs:
    """A model's answers on one split, in the order the data came."""

    logits: Tensor  # (samples, classes)
    labels: Tensor  # (samples,)
    keys: Tensor  # (samples,) checksums of the inputs
    features: Tensor | None = None  # (kept, width), the kept samples in a drawn order
    rows: Tensor | None = None  # (kept,) which samples those are

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        return self.logits.shape[1]

    def reordered(self, order: Tensor) -> SplitOutputs:
        """The same answers with the samples in another order."""
        rows = self.rows
        if rows is not None:
            rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))[rows]
        return replace(self, logits=self.logits[order], labels=self.labels[order], keys=self.keys[order], rows=rows)


@dataclass(frozen=True)
class Outputs:
    """A model's answers on every split: all that most figures need, so that a reference is run only once."""

    splits: Mapping[str, SplitOutputs]
    feature_layer: str | None = None  # "fc:input" is what the layer fc receives, "avgpool" what avgpool returns

    def __getitem__(self, split: str) -> SplitOutputs:
        if split not in self.splits:
            raise DataError(f"these outputs have no split {split!r}. {suggest(split, self.splits)}")
        return self.splits[split]

    @property
    def classes(self) -> int:
        return next(iter(self.splits.values())).classes

    def save(self, path: str | Path, half: bool = False) -> None:
        """Write one safetensors file, of several processes the first; `half` stores logits and features as float16."""
        if not is_first():
            return
        tensors: dict[str, Tensor] = {}
        for name, split in self.splits.items():
            for part, value in _parts(split).items():
                stored = value.to(_HALF) if half and value.is_floating_point() else value
                if not torch.equal(stored.isfinite(), value.isfinite()):
                    raise FileError(f"{part} of split {name!r} are too large for float16. Save with half=False.")
                tensors[f"{name}/{part}"] = stored
        write_tensors(Path(path), tensors, _KIND, {"splits": list(self.splits), "feature_layer": self.feature_layer})

    @classmethod
    def load(cls, path: str | Path) -> Outputs:
        """The outputs that `save` wrote, in float32 or what they were stored in."""
        tensors, header = read_tensors(Path(path), _KIND)
        splits = {}
        try:
            check_fields(header, {"splits": list[str], "feature_layer": str | None})
        except TypeError as error:
            raise FileError(f"{path} was written by another version of unmerge: {error}.") from error
        for name in header["splits"]:
            parts = {
                key.removeprefix(f"{name}/"): value for key, value in tensors.items() if key.startswith(f"{name}/")
            }
            parts = {part: value.float() if value.dtype == _HALF else value for part, value in parts.items()}
            if not _fit_together(parts):
                raise FileError(f"{path} holds no answers of a model on split {name!r}: it has {listing(parts)}.")
            splits[name] = SplitOutputs(**parts)
        return cls(splits, header["feature_layer"])


def aligned(outputs: Outputs, reference: Outputs, name: str) -> Outputs:
    """The outputs with every split in the reference's order; other samples are an error."""
    if outputs.classes != reference.classes:
        raise DataError(
            f"model {name!r} has {outputs.classes} classes, the one it is compared with {reference.classes}. "
            "Compare models with the same classes; a removed class keeps its logit."
        )
    splits = {}
    for split, own in outputs.splits.items():
        other = reference.splits.get(split)
        order = None if other is None else alignment(own.keys, own.labels, other.keys, other.labels)
        if other is None:
            splits[split] = own
        elif order is not None:
            splits[split] = own.reordered(order)
        elif torch.equal(own.labels, other.labels):
            warn(
                f"split {split!r} of model {name!r} has other inputs with the same labels (augmentation, another "
                "precision?); its samples are taken to be in the same order."
            )
            splits[split] = own
        else:
            raise DataError(
                f"split {split!r} of model {name!r} has other samples ({len(own)} against {len(other)}) than the "
                "model it is compared with. Turn augmentation off and give all models the same data."
            )
    return replace(outputs, splits=splits)


def check(outputs: Outputs, name: str) -> None:
    """Refuse outputs that are empty or whose labels are no classes of the model."""
    if not outputs.splits:
        raise DataError(f"model {name!r} has outputs of no split. Expected some of forget, retain and test.")
    for split, part in outputs.splits.items():
        if len(part) == 0:
            raise DataError(f"split {split!r} is empty: it has batches but no sample.")
        outside = (part.labels < 0) | (part.labels >= part.classes)
        if outside.any():
            found = listing(str(label) for label in part.labels[outside].unique().tolist())
            raise DataError(
                f"split {split!r} has {int(outside.sum())} labels outside the {part.classes} classes of model "
                f"{name!r}: {found}. Expected 0 to {part.classes - 1}."
            )
        if part.logits.isnan().any():
            raise DataError(f"model {name!r} returns NaN logits on split {split!r}, so nothing can be measured.")
    widths = {part.classes for part in outputs.splits.values()}
    if len(widths) > 1:
        raise DataError(f"model {name!r} returns different numbers of classes on its splits: {sorted(widths)}.")


def _fit_together(parts: Mapping[str, Tensor]) -> bool:
    """Whether tensors from a file are those of one split."""
    required, optional = {"logits", "labels", "keys"}, {"features", "rows"}
    if set(parts) not in (required, required | optional) or parts["logits"].dim() != 2:
        return False
    samples, whole = len(parts["logits"]), [name for name in parts if name in ("labels", "keys", "rows")]
    sizes = dict.fromkeys(("labels", "keys"), samples)
    if "features" in parts:
        sizes["rows"] = len(parts["features"]) if parts["features"].dim() == 2 else -1
    return (
        all(parts[name].shape == (size,) for name, size in sizes.items())
        and all(parts[name].dtype == torch.int64 for name in whole)
        and all(parts[name].is_floating_point() for name in parts if name not in whole)
        and ("rows" not in parts or bool(((parts["rows"] >= 0) & (parts["rows"] < samples)).all()))
    )


def _parts(split: SplitOutputs) -> dict[str, Tensor]:
    parts = {"logits": split.logits, "labels": split.labels, "keys": split.keys}
    if split.features is not None and split.rows is not None:
        parts |= {"features": split.features, "rows": split.rows}
    return parts
