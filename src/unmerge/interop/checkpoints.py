"""edit_checkpoint(): a checkpoint directory with the edit in its weights, without loading the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from unmerge.distributed.processes import is_first
from unmerge.distributed.warning import warn
from unmerge.editing.binding import check_shapes, other_weights
from unmerge.editing.edit import Edit
from unmerge.editing.rewriting import rewritten, surviving_share
from unmerge.errors import EditError, FileError, listing
from unmerge.interop.card import model_card
from unmerge.interop.locating import is_same, located
from unmerge.interop.shards import INDEX, SINGLE, Checkpoint, copy_file, overwriting
from unmerge.model.layers import tensor_name, weight_in
from unmerge.storage.directories import taking_the_place_of

# Files that hold the weights once more, in which nothing is forgotten.
_WEIGHTS = (
    *(".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".ot", ".pt", ".pth", ".tflite"),
    *(".bin.index.json", ".safetensors.index.json"),
)
_RECORD = "unmerge.json"  # of `unmerge apply`, and not true of what is written here


def edit_checkpoint(
    dir_in: str | Path,
    edit: Edit,
    alpha: float | None,
    dir_out: str | Path,
    *,
    head_alpha: float | None = None,
    force: bool = False,
    base_model: str | None = None,
) -> dict[str, float]:
    """Write a Hugging Face directory with the edit in its weights; returns what `Edit.survived` says of each layer.

    The tensors are those of `edit.apply(model, alpha)`, bit for bit; types, shards, index and the other files stay. One
    tensor is in memory at a time. dir_out appears whole or not at all. Of several processes the first writes, and
    does not wait for the others, which return nothing of the layers.
    alpha: the strength; None takes the recommendation. head_alpha, force: as for `Edit.apply`.
    base_model: what the card in README.md calls the base, a repository on the Hub; by default the name of dir_in.
    """
    source, target = Path(dir_in), Path(dir_out)
    alpha, head_alpha = edit.strengths(alpha, head_alpha)
    if not is_first():
        return {}
    _check_target(source, target)
    with taking_the_place_of(target) as part:
        survived = put_edited(part, source, edit, alpha, head_alpha, force)
        # A bare name would read as a repository on the Hub.
        card = model_card(edit.to_dict(), base_model or f"./{source.resolve().name}", alpha=alpha)
        (part / "README.md").write_text(card, encoding="utf-8")
    return survived


def put_edited(
    part: Path, source: Path, edit: Edit, alpha: float, head_alpha: float, force: bool = False
) -> dict[str, float]:
    """What `edit_checkpoint` writes but for the card, into an empty directory."""
    head_bias = [] if edit.head is None else [tensor_name(edit.head, "bias")]  # which tells of rows removed before
    checkpoint = located(Checkpoint.of(source), [*edit.touched, *head_bias], edit.weights)
    _check_weights(edit, checkpoint, force)
    survived: dict[str, float] = {}
    _copy_beside(source, part, checkpoint.files)
    for file in checkpoint.files:
        copy_file(source / file, part / file)
        with overwriting(part / file) as put:
            for name in (name for name in edit.touched if checkpoint.places[name].file == file):
                state = {key: checkpoint[key] for key in (name, *head_bias) if key in checkpoint}
                value = rewritten(edit, name, state, alpha, head_alpha)
                if not value.isfinite().all():
                    raise EditError(f"at alpha={alpha:g} the edit makes {name} infinite in its type; lower alpha.")
                put(checkpoint.places[name].name, value)
                survived |= _survived(edit, name, state, alpha, head_alpha)
    return {name: survived[name] for name in edit.layers}


def _survived(edit: Edit, name: str, state: Mapping[str, Tensor], alpha: float, head_alpha: float) -> dict[str, float]:
    """What rounding leaves of the change of the layers that have this tensor as their weight."""
    return {
        own: surviving_share(layer, weight_in(state, own), head_alpha if own == edit.head else alpha)
        for own, layer in edit.layers.items()
        if tensor_name(own, "weight") == name
    }


def _check_target(source: Path, target: Path) -> None:
    if source.resolve() in (target.resolve(), *target.resolve().parents):
        raise FileError(f"{target} lies in {source}, which stays as it is. Choose a directory outside of it.")
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise FileError(f"{target} is a file or a link; expected a directory, or none yet.")
    if target.is_dir() and any(target.iterdir()):
        raise FileError(f"{target} is not empty. Choose another directory, or remove it first.")


def _check_weights(edit: Edit, checkpoint: Checkpoint, force: bool) -> None:
    """Refuse a checkpoint of another model, and without `force` one of other weights."""
    missing = [name for name in edit.touched if name not in checkpoint]
    if missing:
        raise EditError(
            f"{checkpoint.directory} has no {listing(missing)}, which this edit changes. It belongs to another model; "
            "or the weight is tied there and saved only as the embedding, or stored in another form: then load the "
            "model and use edit.apply(model) and model.save_pretrained(...)."
        )
    check_shapes(edit, {name: checkpoint.outline(name) for name in edit.touched})
    changed = []
    for name in edit.touched:
        tensor = checkpoint[name]
        if not tensor.is_floating_point():
            raise EditError(f"{name} is {tensor.dtype} in {checkpoint.directory}: a quantised weight cannot be edited.")
        if name not in edit.weights or not is_same(tensor, edit.weights[name]):
            changed.append(name)
    if changed and not force:
        raise other_weights(edit, changed)


def _copy_beside(source: Path, part: Path, shards: list[str]) -> None:
    """Copy all that is not weights: configuration, tokenizer, index, licence; directories too, but hidden ones."""
    left_out = []
    for path in sorted(source.rglob("*")):
        name = path.relative_to(source)
        is_hidden = any(place.startswith(".") for place in name.parts[:-1])
        if not path.is_file() or is_hidden or str(name) in (*shards, _RECORD):
            continue
        is_model = len(name.parts) == 1 and name.suffix == ".safetensors"  # deeper ones belong to other modules
        is_index = str(name) == INDEX and SINGLE not in shards
        if not is_index and (is_model or name.name.endswith(_WEIGHTS)):
            left_out.append(str(name))
        else:
            copy_file(path, part / ("README.base.md" if str(name) == "README.md" else name))
    if left_out:
        warn(f"{listing(left_out)} were not copied: they hold weights in which nothing is forgotten.")
