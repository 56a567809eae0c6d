"""Reading and writing safetensors files with a JSON header: all or nothing, and never a pickle."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from unmerge.errors import FileError, listing
from unmerge.storage.fingerprint import differences, fingerprint
from unmerge.storage.forms import check_fields
from unmerge.storage.leftovers import sweep, unfinished

_LONGEST_NAME = 200  # of a shard


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A path to write to that becomes `target` only when the block ends well."""
    check_place(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    sweep(target)
    try:
        with unfinished(target) as place:
            part = place / target.name
            yield part
            with open(part, "rb") as written:
                os.fsync(written.fileno())
            os.chmod(part, 0o666 & ~umask())
            os.replace(part, target)
    except SafetensorError as error:
        raise FileError(f"{target} could not be written: {error}") from error
    except OSError as error:
        name_place(error, target)
        raise


def check_place(target: Path, is_folder: bool = False) -> None:
    """Refuse to write a file or a folder where something else is in the way."""
    above = next((place for place in target.parents if os.path.lexists(place) and not place.is_dir()), None)
    if above is not None:
        raise FileError(f"{above} is {_kind(above)}; expected a folder, in which {target.name} can be written.")
    if (os.path.lexists(target) and not target.is_dir()) if is_folder else target.is_dir():
        wanted = "folder" if is_folder else "file"
        raise FileError(f"{target} is {_kind(target)}; expected the name of a {wanted} to write.")


def _kind(place: Path) -> str:
    return "a folder" if place.is_dir() else "a file" if place.exists() else "a broken link"


def name_place(error: OSError, place: Path) -> None:
    """Give an error of the system the file it lacks: a full disk does not say where."""
    if error.errno is not None and error.filename is None:
        error.filename = str(place)


def write_tensors(path: Path, tensors: Mapping[str, Tensor], kind: str, header: Mapping[str, Any]) -> None:
    """Write one safetensors file whose metadata holds `header` and the checksums of the tensors."""
    with replacing(path) as part:
        put_tensors(part, tensors, kind, header)


def put_tensors(part: Path, tensors: Mapping[str, Tensor], kind: str, header: Mapping[str, Any]) -> None:
    """What `write_tensors` writes, to a path of `replacing`."""
    stored: dict[str, Tensor] = {}
    taken: set[int] = set()
    for name, tensor in tensors.items():
        flat = tensor.detach().cpu().contiguous()
        # safetensors refuses tensors that share memory.
        memory = flat.untyped_storage().data_ptr()
        stored[name] = flat.clone() if memory in taken else flat
        taken.add(memory)
    metadata = {
        "format": "pt",
        "unmerge": kind,
        "header": json.dumps(header),
        "checksums": json.dumps(fingerprint(stored)),
    }
    # Checksums of the metadata too: a changed header is as wrong as a changed tensor.
    metadata["seal"] = _seal(metadata)
    save_file(stored, part, metadata=metadata)


def read_tensors(path: Path, kind: str, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], Any]:
    """The tensors and the header of a file that `write_tensors` wrote, checked against its checksums."""
    with opened(path) as (file, metadata):
        header, checksums = _sealed(path, kind, metadata)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        changed = differences(fingerprint(tensors), checksums)
        if changed:
            raise FileError(f"{path} was changed after it was written: tensor {changed[0]!r} has another checksum.")
    return {name: tensor.to(device) for name, tensor in tensors.items()}, header


def read_header(path: Path, kind: str) -> Any:
    """The header alone, without reading a tensor."""
    with opened(path) as (_, metadata):
        return _sealed(path, kind, metadata)[0]


@contextmanager
def opened(path: Path) -> Iterator[tuple[Any, dict[str, str]]]:
    """An open safetensors file and its metadata; a damaged file is an error that names it.

    Both are of one version of the file, whoever replaces it meanwhile.
    """
    if not path.is_file():
        raise FileError(f"there is no file {path}.")
    try:
        with open(path, "rb") as held, safe_open(_place_of(held, path), framework="pt") as file:
            yield file, file.metadata() or {}
    except (SafetensorError, RuntimeError, OSError) as error:
        raise FileError(f"{path} is damaged or no safetensors file: {error}") from error


def _place_of(held: BinaryIO, path: Path) -> str:
    """Where to open a file once more, as safetensors does for its data, and not what has taken its name since."""
    place = f"/dev/fd/{held.fileno()}"
    # Windows has no such place, and replaces no file that is open.
    return place if os.path.exists(place) else str(path)


def load_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a checkpoint file: safetensors, or what torch.load reads with weights_only."""
    if path.suffix == ".safetensors":
        with opened(path) as (file, _):
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}.") from error
    except Exception as error:
        raise FileError(
            f"{path} cannot be read without running code from it ({type(error).__name__}). "
            "Save the state dict as safetensors, or with torch.save(model.state_dict(), ...)."
        ) from error
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        keys = f" with {listing(map(str, loaded))}" if isinstance(loaded, Mapping) else ""
        raise FileError(f"{path} holds a {type(loaded).__name__}{keys}; expected a state dict of tensors.")
    return dict(loaded)


def read_weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor by the index of a sharded checkpoint; only files beside the index are accepted."""
    found = read_json(index, "checkpoint index")
    try:
        check_fields(found, {"weight_map": dict[str, str]}, "it")
    except TypeError as error:
        raise FileError(f"{index} is no checkpoint index: {error}.") from error
    places: dict[str, str] = found["weight_map"]
    outside = [
        file[:_LONGEST_NAME]
        for file in sorted(set(places.values()))
        if Path(file).name != file or set(file) & set("\\:\0") or len(file) > _LONGEST_NAME
    ]
    if outside:
        raise FileError(f"{index} names files outside its directory: {listing(outside)}.")
    return places


def write_weights(path: Path, state: Mapping[str, Tensor]) -> None:
    """Write a state dict as safetensors, whole or not at all; a tensor under two names is written twice."""
    with replacing(path) as part:
        save_file({name: tensor.detach().clone().contiguous().cpu() for name, tensor in state.items()}, part)


def read_json(path: Path, what: str) -> Any:
    """The value in a JSON file; `what` says in an error what was expected."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}.") from error
    except (OSError, ValueError, RecursionError) as error:
        raise FileError(f"{path} is no {what}: {error!r}.") from error


def write_json(path: Path, value: Any) -> None:
    with replacing(path) as part:
        put_json(part, value)


def put_json(part: Path, value: Any) -> None:
    """What `write_json` writes, to a path of `replacing`."""
    part.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def umask() -> int:
    """The bits that this process takes from the mode of a new file."""
    current = os.umask(0)
    os.umask(current)
    return current


def _sealed(path: Path, kind: str, metadata: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """The header and the checksums of the tensors, as they were written."""
    if metadata.get("unmerge") != kind:
        found = metadata.get("unmerge", "a safetensors file of another program")
        raise FileError(f"{path} is not a file of {kind}: found {found}.")
    if metadata.get("seal") != _seal(metadata):
        raise FileError(f"{path} was changed after it was written: its header does not match its seal.")
    try:
        header, checksums = (json.loads(metadata[key]) for key in ("header", "checksums"))
    except (KeyError, ValueError, RecursionError) as error:
        raise FileError(f"{path} was written by another version of unmerge: {error!r}.") from error
    if not isinstance(header, dict) or not isinstance(checksums, dict):
        raise FileError(f"{path} was written by another version of unmerge: its header holds no fields.")
    return header, checksums


def _seal(metadata: Mapping[str, str]) -> str:
    parts = [f"{key}={metadata.get(key, '')}" for key in ("unmerge", "header", "checksums")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
