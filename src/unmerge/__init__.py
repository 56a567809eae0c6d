"""Make a fine-tuned network forget a class or a concept by a closed-form, low-rank, reversible edit."""

from unmerge.collection import collect
from unmerge.edit import Edit, LayerEdit
from unmerge.moments import Moments
from unmerge.pipeline import fit
from unmerge.recipe import Recipe
from unmerge.statistics import Statistics
from unmerge.version import VERSION as __version__

__all__ = ["Edit", "LayerEdit", "Moments", "Recipe", "Statistics", "__version__", "collect", "fit"]
