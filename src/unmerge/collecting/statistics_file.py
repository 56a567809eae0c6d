"""What the file of statistics holds, and whether what was read from one is that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from unmerge.collecting.accumulation import LayerStatistics
from unmerge.errors import listing
from unmerge.model.layers import tensor_name
from unmerge.storage.forms import check_fields, shown
from unmerge.sums.moments import Moments
from unmerge.sums.sketching import moments_of

_MOST = 2**53  # rows or samples: beyond it a float cannot count
STATISTICS = {
    "samples": int,
    "weights": dict[str, str],
    "classes": list[int],
    "class_samples": list[int],
    "head": str | None,
    "shift_to": dict[str, str | None],
    "left_out": dict[str, str],
    "counted": str | None,
}


def check_statistics(header: Any) -> None:
    """Raise TypeError or ValueError where the header of statistics is not that of a pass over samples."""
    check_fields(header, {**STATISTICS, "layers": dict[str, dict[str, Any]]})
    layers, classes, counts = header["layers"], header["classes"], header["class_samples"]
    in_range = 0 < header["samples"] <= _MOST and all(0 < count <= _MOST for count in counts)
    if not layers or not in_range or len(classes) != len(counts) or sorted(set(classes)) != classes:
        raise ValueError(f"{len(layers)} layers, {header['samples']} samples, {len(classes)} classes")
    if header["head"] is not None and not any(
        name.startswith(tensor_name(header["head"], "")) for name in header["weights"]
    ):
        raise ValueError(f"a head {shown(header['head'])} that the model has not")
    places, shift_to = {None, *header["weights"]}, header["shift_to"]
    lost = [name for name in layers if name not in shift_to or shift_to[name] not in places]
    if lost:
        raise ValueError(f"no place for a constant of {listing(lost)}")


def tensors_of(layer: LayerStatistics) -> dict[str, Tensor]:
    """The tensors of a layer by the names that a file has for them."""
    tensors = {"class_rows": layer.class_rows, "class_sums": layer.class_sums}
    if layer.sample is not None:
        tensors["sample"] = layer.sample
    parts = {"": layer.moments} | {f"{code}/": part for code, part in layer.class_moments.items()}
    for prefix, moments in parts.items():
        sums = {"pivot": moments.pivot, "total": moments.total, **moments.sums}
        tensors |= {f"{prefix}{name}": part for name, part in sums.items()}
    return tensors


def layer_of(tensors: Mapping[str, Tensor], entry: Mapping[str, Any], classes: int) -> LayerStatistics:
    """The layer of such tensors; KeyError, TypeError or ValueError where they do not belong together."""
    check_fields(entry, {"rows": float, "class_moments": dict[str, float]}, "a layer")
    features = tensors["pivot"].shape  # (d), or (groups, d)

    def moments(prefix: str, rows: float) -> Moments:
        expected: dict[str, tuple[int, ...]] = {"pivot": features, "total": features}
        if "sketch" in tensors:  # of the same size in every part
            expected |= {"sketch": (*features, tensors["sketch"].shape[-1]), "diagonal": features}
        else:
            expected |= {"gram": (*features, *features[-1:])}
        parts = {part: tensors[f"{prefix}{part}"] for part in expected}
        if not 0 < rows <= _MOST or any(parts[part].shape != shape for part, shape in expected.items()):
            raise ValueError(f"moments of {rows} rows with shapes {[tuple(part.shape) for part in parts.values()]}")
        return moments_of(rows, parts.pop("pivot"), parts.pop("total"), parts)

    labelled = (tensors["class_rows"].shape, tensors["class_sums"].shape)
    if labelled not in (((0,), (0,)), ((classes,), (classes, *features))) or not 1 <= len(features) <= 2:
        raise ValueError(f"class tensors of shapes {[tuple(shape) for shape in labelled]} for {classes} classes")
    if any(not 0 <= int(code) < classes for code in entry["class_moments"]):
        raise ValueError(f"moments of classes {listing(entry['class_moments'])} out of {classes}")
    broken = [key for key, tensor in tensors.items() if not tensor.is_floating_point() or not tensor.isfinite().all()]
    if broken:
        raise ValueError(f"{listing(broken)} hold no sums")
    return LayerStatistics(
        moments("", entry["rows"]),
        tensors["class_rows"],
        tensors["class_sums"],
        {int(code): moments(f"{code}/", rows) for code, rows in entry["class_moments"].items()},
        tensors.get("sample"),
    )
