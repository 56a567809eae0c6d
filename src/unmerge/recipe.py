"""Every knob of the method once: its name, default, range and meaning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import Any

from torch import nn

from unmerge.errors import DataError, RecipeError, suggest
from unmerge.rules import Rule

LayerChoice = str | Sequence[str] | Mapping[str, Any] | Callable[[str, nn.Module], bool] | None

SOLVERS = ("exact", "budgeted", "soft-threshold")
PROBE_ROWS = 8192  # a layer, of which the paper's CAV probes and clusters are made


@dataclass(frozen=True)
class Basis:
    """What the other stages have to know of a way to find forget directions."""

    keeps: str = ""  # what a forget pass keeps beside moments: "classes", those of each class, or "rows", a sample
    closed: bool = False  # gives the coefficients too, so that there is no solver
    ranked: bool = False  # has as many directions as `rank` says
    of_means: bool = False  # needs of what is forgotten the class means alone
    from_classes: bool = False  # can be had from those and the statistics of everything, exactly where it is of_means
    probes: bool = False  # CAV probes, whose rows `max_points` limits
    asks_mean: bool = False  # differs with whether the mean response is kept
    may_skip: bool = False  # leaves a layer alone where it finds no direction
    dosed: bool = False  # has strengths by depth, a classifier of its own and a refit after it (`solving/doses`)
    deflates: bool = False  # projects the top `deflate` retain eigenvectors out


BASES = {
    "auto": Basis(of_means=True, from_classes=True),  # it may become blend
    "blend": Basis(closed=True, of_means=True, from_classes=True, dosed=True),
    "private-mean": Basis(closed=True, of_means=True, from_classes=True, may_skip=True),
    "wiener": Basis(closed=True, ranked=True, asks_mean=True),
    "lda": Basis(from_classes=True),
    "cav-class": Basis(probes=True, keeps="classes"),
    "cav-kmeans": Basis(probes=True, ranked=True, keeps="rows"),
    "contrastive": Basis(ranked=True),
    "pca": Basis(ranked=True),
    "deflated-pca": Basis(ranked=True, deflates=True),
}


def _word(default: str, *words: str, meaning: str) -> Any:
    return field(default=default, metadata={"rule": Rule(words), "meaning": meaning})


def _number(
    default: float | str | None,
    low: float = -math.inf,
    *,
    words: tuple[str, ...] = (),
    optional: bool = False,
    meaning: str,
) -> Any:
    rule = Rule(words, number=float, low=low, optional=optional)
    return field(default=default, metadata={"rule": rule, "meaning": meaning})


def _whole(default: int | str | None, low: float = 0, words: tuple[str, ...] = (), *, meaning: str) -> Any:
    rule = Rule(words, number=int, low=low, optional=default is None)
    return field(default=default, metadata={"rule": rule, "meaning": meaning})


@dataclass(frozen=True)
class Recipe:
    """How an edit is made. `Recipe()` is the untuned default; `Recipe.paper(...)` the paper's configurations."""

    basis: str = _word(
        "auto",
        *BASES,
        meaning="how the forget directions of a layer are built; auto: blend for whole classes, lda for other labelled "
        "samples, wiener without labels (with another solver than exact: lda, or contrastive without labels)",
    )
    rank: int = _whole(16, 1, meaning="directions a layer for the bases that have a rank (k)")
    retain_rank: int = _whole(16, 0, meaning="retain eigenvectors that a solver keeps the edit away from")
    lam: float = _number(10.0, 0, meaning="weight of the leakage into the retain span (λ), for a solver or wiener")
    gamma: float = _number(0.0, 0, meaning="weight of the size of the edit (γ)")
    solver: str = _word("exact", *SOLVERS, meaning="how the coefficients are found; closed forms need none")
    steps: int = _whole(100, 0, meaning="Adam steps of the budgeted solver (T)")
    lr: float = _number(1e-3, 0, meaning="learning rate of the budgeted solver (η)")
    delta: float = _number(0.1, 0, meaning="threshold of the soft-threshold solver (δ)")
    centering: str = _word("retain", "retain", "separate", meaning="centre of the forget pool in CAV probes")
    ridge: float = _number(1e-2, 0, meaning="ridge of probes and whitening, relative to the mean eigenvalue (μ)")
    max_points: int | None = _whole(None, 1, meaning="rows a layer that CAV probes are fitted on; None: all")
    layers: LayerChoice = field(
        default=None,
        metadata={
            "rule": None,
            "meaning": "names, 're:' patterns, a predicate, or a transformer's mlp, attention, outputs, last4 "
            "(blocks), mlp:last4; None: by skip_layers",
        },
    )
    skip_layers: int | str = _whole(
        "auto", 0, ("auto",), meaning="convolutions and linears left alone at the start; auto: three quarters"
    )
    deflate: int = _whole(1024, 0, meaning="retain eigenvectors projected out of the forget covariance")
    mean: str = _word(
        "auto",
        "auto",
        "preserve",
        "orthogonal",
        "free",
        meaning="the mean retain response: preserved by a constant (auto: where a bias or BatchNorm takes it), by "
        "directions orthogonal to the mean input, or left free",
    )
    bias: str = _word("keep", "keep", "shrink", meaning="whether a bias shrinks with the edit, as in the paper")
    head: str = _word(
        "auto",
        *("auto", "remove", "edit", "keep"),
        meaning="the classifier: forgotten rows removed, edited like a layer, or left; auto: removed for classes",
    )
    alpha: float | None = _number(
        None,
        0,
        optional=True,
        meaning="recommended strength; None: 1 where rows of the classifier are removed, or edited by blend",
    )
    seed: int = _whole(0, 0, meaning="seed of k-means, of the sample it sees and of the verdict's random draw")
    head_strength: float = _number(
        1.0,
        0,
        meaning="how far blend lowers the outputs of forgotten classes where no row of the classifier is removed: "
        "times what their own means give them",
    )
    early_strength: float = _number(
        0.3,
        0,
        meaning="what part of its edit blend makes twelve and more convolutions before the last edited one; from there "
        "it grows evenly to all of it",
    )
    refit: float | None = _number(
        0.1,
        0,
        optional=True,
        meaning="ridge, relative to the mean eigenvalue, with which the classifier's rows of retained classes are "
        "fitted to features that blend has edited, where BatchNorms are recalibrated; None: they stay",
    )
    answer_length: float | str = _number(
        "auto",
        0,
        words=("auto",),
        meaning="how many times as long the refit is to make the mean answers to forgotten classes, where those are "
        "seen; auto: the shorter they are, the more, never below 1, or 1.3 if the nearest class is forgotten too",
    )

    def __new__(cls, *args: Any, **knobs: Any) -> Recipe:
        # Before the generated __init__ sees it, so that a typing error gets the near name.
        names = [entry.name for entry in fields(cls)]
        for name in knobs:
            if name not in names:
                raise RecipeError(f"a recipe has no field {name!r}. {suggest(name, names)}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        self._check_fields()
        self._check_solver()

    def _check_fields(self) -> None:
        for entry in fields(self):
            value, rule = getattr(self, entry.name), entry.metadata["rule"]
            if rule is None:
                self._check_layers()
            elif not rule.accepts(value):
                hint = suggest(value, rule.words) if isinstance(value, str) and rule.words else ""
                raise RecipeError(f"{entry.name}={value!r} is not {rule}. {hint}".strip())
            elif rule.number is not None and isinstance(value, Real):
                # Plain numbers, which JSON can hold, in place of numpy's.
                object.__setattr__(self, entry.name, rule.number(value))

    def _check_solver(self) -> None:
        if self.traits.closed and self.solver != "exact":
            raise RecipeError(f"basis={self.basis!r} is a closed form of its own: use solver='exact'.")

    def _check_layers(self) -> None:
        names = [self.layers] if isinstance(self.layers, str) else self.layers
        if names is None or callable(names):
            return
        listed = list(names) if isinstance(names, Iterable) else [None]
        if not all(isinstance(name, str) for name in listed):
            raise RecipeError(f"layers={self.layers!r} is not a name, a list of names, a pattern or a function.")
        if isinstance(names, Iterator):  # which can be read once
            object.__setattr__(self, "layers", listed)

    @property
    def traits(self) -> Basis:
        """What there is to know of its basis."""
        return BASES[self.basis]

    @property
    def limits_rows(self) -> bool:
        """Whether probes see the first rows of each layer alone."""
        return self.traits.probes and self.max_points is not None

    @staticmethod
    def paper(variant: str, init: str = "zero") -> Recipe:
        """The paper's configuration for one basis and one initialisation (Tab. "configs"), alpha included."""
        cells: dict[tuple[str, str], dict[str, Any]] = {
            ("pca", "pretrained"): {"rank": 64, "skip_layers": 45, "alpha": 1.6, "lam": 5.0},
            ("cav-kmeans", "pretrained"): {"rank": 16, "skip_layers": 35, "alpha": 2.5, "lam": 5.0},
            ("cav-class", "pretrained"): {"rank": 16, "skip_layers": 35, "alpha": 2.5, "lam": 5.0},
            ("pca", "zero"): {"rank": 128, "skip_layers": 45, "alpha": 1.25, "lam": 50.0},
            ("cav-kmeans", "zero"): {"rank": 16, "skip_layers": 40, "alpha": 1.0, "lam": 50.0},
            ("cav-class", "zero"): {"rank": 16, "skip_layers": 40, "alpha": 1.3, "lam": 50.0},
        }
        if (variant, init) not in cells:
            known = ", ".join(f"({name!r}, init={start!r})" for name, start in cells)
            raise RecipeError(f"the paper has no configuration ({variant!r}, init={init!r}); it has {known}.")
        cell = cells[variant, init]
        return Recipe(
            basis=variant,
            retain_rank=cell["rank"],
            gamma=0.5,
            solver="budgeted",
            centering="separate",
            max_points=None if variant == "pca" else PROBE_ROWS,
            mean="free",
            bias="shrink",
            head="edit",
            **cell,
        )

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> Recipe:
        return Recipe(**dict(values))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON and YAML; a predicate must have been resolved to names before."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        if callable(self.layers):
            raise RecipeError("layers is a function, which no file can hold; replace it by the names it selects.")
        if self.layers is not None and not isinstance(self.layers, str):
            values["layers"] = list(self.layers)
        return values

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with some fields changed."""
        return replace(self, **changes)


def given_or_default(recipe: Recipe | None) -> Recipe:
    """The recipe that a caller passed, or the default where it passed none."""
    if recipe is not None and not isinstance(recipe, Recipe):
        raise DataError(f"recipe is a {type(recipe).__name__}; expected a Recipe, for example Recipe(basis='lda').")
    return recipe or Recipe()
