"""Make a fine-tuned network forget a class or a concept by a closed-form, low-rank, reversible edit."""

from unmerge import distributed, errors, measures, tokens
from unmerge.collecting.collection import collect
from unmerge.collecting.statistics import Statistics
from unmerge.diagnosing.diagnosis import Diagnosis, diagnose
from unmerge.editing.composition import compose
from unmerge.editing.edit import Edit
from unmerge.editing.layer_edit import LayerEdit
from unmerge.editing.searching import AlphaSearch
from unmerge.editing.strength import search_alpha
from unmerge.interop.checkpoints import edit_checkpoint
from unmerge.pipeline import fit
from unmerge.planning.plans import Plan
from unmerge.recipe import Recipe
from unmerge.requests.parts import plan
from unmerge.sums.moments import Moments
from unmerge.version import VERSION as __version__

__all__ = [
    "AlphaSearch",
    "Diagnosis",
    "Edit",
    "LayerEdit",
    "Moments",
    "Plan",
    "Recipe",
    "Statistics",
    "__version__",
    "collect",
    "compose",
    "diagnose",
    "distributed",
    "edit_checkpoint",
    "errors",
    "fit",
    "measures",
    "plan",
    "search_alpha",
    "tokens",
]
