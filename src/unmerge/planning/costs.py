"""The bytes that the statistics of a layer and its linear algebra take, exact or as a sketch that fits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from torch import nn

from unmerge.linalg.eigen import EXACT_UP_TO, may_be_dense
from unmerge.model.layers import device_of_layer, layer_of, weight_matrix
from unmerge.recipe import PROBE_ROWS, Recipe

# Bytes a square of the input's width that the linear algebra of a layer holds beside its statistics, measured.
_WORKING = {"deflated-pca": 56, "contrastive": 28, "wiener": 28}
_WORKING_OTHERS = 40
_WORKING_DENSE = 56  # of inputs so narrow, or directions so many, that all eigenvectors are found
_DIRECTION = 32  # bytes a feature and direction
_MEAN = 184  # bytes a feature and class, where the bases are made of class means
_VERDICT = 4  # of a Gram whose halves are mirrored, and later of all inputs but the control's
_VERDICT_NARROW = 36  # of inputs so narrow, or coordinates of a sketch, that all eigenvectors are found
_CLUSTER = {"cav-class": 4, "cav-kmeans": 16}  # and this many more for each class or cluster
_TASK_VECTOR = 16  # bytes an entry of the weight, while its coefficients are found
CONTROL_GROUPS = 16  # of random samples, whose means tell how far apart those of random samples lie
_KRYLOV = 16 * 1024  # bytes a feature

# The size of a sketch: so many columns beyond the directions that are asked for, so many where no recipe asks, and at
# most this part of the width.
_OVERSAMPLING = 16
_LEAST = 64
_PART = 4


@dataclass(frozen=True)
class Grams:
    """How many Gram matrices a layer has while it is read and judged, and later while its edit is computed."""

    reading: int = 1
    solving: int = 1
    counting: int = 1  # of those that are read the most that one pass counts
    rows: int = 0  # that are kept beside them
    sums_reading: int = 0  # class sums beside them
    sums_solving: int = 0


@dataclass(frozen=True)
class Cost:
    """The bytes of layers that share their input, whose statistics are one."""

    layers: tuple[str, ...]
    features: int
    reading: int  # statistics
    solving: int
    counting: int = 0  # more for the sums of a pass, which are wider on the CPU until it ends
    settling: int = 0  # and for one of them while it is narrowed
    judging: int = 0  # linear algebra
    working: int = 0
    sketch: int | None = None  # the size of what stands for the Gram, where that does not fit

    @property
    def bytes(self) -> int:
        """The most that is held at one time."""
        return max(self.reading + max(self.counting + self.settling, self.judging), self.solving + self.working)


def grams_of(recipe: Recipe, classes: int, retained: int, with_verdict: bool) -> Grams:
    """The Gram matrices of a request: forget, retain, a random control, and what the recipe's basis adds.

    classes, retained: how many labels forget and retain have; each pool has the sums of its own.
    """
    of_classes = classes if recipe.traits.keeps == "classes" else 0
    forget = 1 + of_classes
    solving = (forget + 1) * (2 if recipe.limits_rows else 1)
    rows = (recipe.max_points or PROBE_ROWS) if recipe.traits.keeps == "rows" else 0
    sums = classes + retained + (of_classes if recipe.limits_rows else 0)
    judged = max(retained, CONTROL_GROUPS) if with_verdict else 0
    return Grams(solving + with_verdict, solving, forget, rows, sums + judged, sums)


def costs_of(
    model: nn.Module,
    names: Iterable[str],
    leaders: Mapping[str, str],
    grams: Grams,
    recipe: Recipe | None = None,
    classes: int = 0,
    memory: int | None = None,
    sketched: Mapping[str, int] | None = None,
) -> list[Cost]:
    """What each set of layers that share their input takes; without a recipe nothing is solved.

    classes: those of the forget set, of which some bases make a cluster each.
    memory: where a Gram takes more, the cost is that of the largest sketch that fits, or of the smallest there is.
    sketched: layers of which only a sketch of this size is known.
    """
    sharing: dict[str, list[str]] = {}
    for name in names:
        sharing.setdefault(leaders.get(name, name), []).append(name)
    return [
        _Layers(model, members, grams, recipe, classes).cost(memory, (sketched or {}).get(members[0]))
        for members in sharing.values()
    ]


class _Layers:
    """Layers that share their input, and what a request keeps of it."""

    def __init__(self, model: nn.Module, members: list[str], grams: Grams, recipe: Recipe | None, classes: int) -> None:
        self._members, self._grams, self._recipe = members, grams, recipe
        first = layer_of(model, members[0])
        weight = weight_matrix(first, first.get_parameter("weight"))  # its shape: one on the meta device has no more
        self._groups, self._features = (weight.shape[0] if weight.dim() == 3 else 1), weight.shape[-1]
        self._wide = max(4, weight.element_size())  # half-precision inputs are summed in float32
        self._device = "cpu" if device_of_layer(model, members[0]).type == "cpu" else "cuda"
        self._widened = 8 - self._wide if self._device == "cpu" else 0
        self._entries = max(layer_of(model, name).get_parameter("weight").numel() for name in members)
        self._clusters = 0 if recipe is None else classes if recipe.traits.keeps == "classes" else recipe.rank

    def cost(self, memory: int | None, known: int | None) -> Cost:
        """The cost of the Gram where it is known and fits, else of a sketch."""
        if known is None:
            exact = self._cost(None)
            least, most = self._least(), self._features // _PART
            if memory is None or exact.bytes <= memory or self._groups > 1 or least > most:
                return exact
        else:
            least, most = min(self._least(), known), known
        if memory is None:
            return self._cost(most)
        while least < most:  # the largest that fits
            middle = (least + most + 1) // 2
            least, most = (middle, most) if self._cost(middle).bytes <= memory else (least, middle - 1)
        return self._cost(least)

    def _least(self) -> int:
        """The size of the smallest sketch that holds what the recipe asks for."""
        if self._recipe is None:
            return _LEAST
        deflated = self._recipe.deflate if self._recipe.traits.deflates else 0
        return max(self._recipe.rank, self._recipe.retain_rank, deflated) + _OVERSAMPLING

    def _cost(self, sketch: int | None) -> Cost:
        features, wide, grams = self._features, self._wide, self._grams
        columns = features if sketch is None else sketch
        gram = self._groups * features * columns * wide
        signs = 0 if sketch is None else gram + 8 * features * grams.reading  # and the diagonals
        rows = self._groups * features * wide * grams.rows
        class_sum = (self._groups * features + 1) * 8  # and its rows' number
        reading = grams.reading * gram + grams.sums_reading * class_sum + rows + signs
        solving = grams.solving * gram + grams.sums_solving * class_sum + rows + signs
        counting = grams.counting * gram * self._widened // wide
        settling = gram if self._widened else 0
        statistics = Cost(tuple(self._members), features, reading, solving, counting, settling, sketch=sketch)
        if self._recipe is None:
            return statistics
        # Groups are solved one after the other. A sketch is solved in the span of those of both sides and of the means.
        width, span = features, 0
        if sketch is not None:
            width = min(features, 2 * sketch + grams.sums_reading + 4)
            span = features * width * wide
        square = width**2 * wide // 4
        basis, rank = self._recipe.basis, min(self._recipe.rank, width)
        is_narrow = sketch is not None or width <= max(EXACT_UP_TO.values())
        factor = _WORKING.get(basis, _WORKING_OTHERS) + self._clusters * _CLUSTER.get(basis, 0)
        if is_narrow or may_be_dense(width, max(rank, self._recipe.retain_rank), self._device):
            factor = max(factor, _WORKING_DENSE)
        judging = square * (_VERDICT_NARROW if is_narrow else _VERDICT) + _KRYLOV * width
        working = square * factor + (_KRYLOV + _DIRECTION * rank) * width
        if self._recipe.traits.of_means:
            working = max(working, _MEAN * width * min(width, grams.sums_solving))
        if sketch is not None:
            judging += 2 * span + 3 * gram + 4 * square * grams.reading
            working += 2 * span + gram + 4 * square * grams.solving
        if grams.reading == grams.solving:  # without a verdict
            judging = 0
        edits = len(self._members) * self._groups * features * rank * wide  # their Q, as long as there are others to do
        working = max(working, _TASK_VECTOR * self._entries)
        return replace(statistics, solving=solving + edits, judging=judging, working=working)
