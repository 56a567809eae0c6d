"""Language models edited and restored as files: shards, types and tokenizer stay, and no model is in memory."""

from __future__ import annotations

from pathlib import Path

from unmerge.cli import adapters
from unmerge.cli.exports import BESIDE
from unmerge.cli.models import is_causal
from unmerge.cli.run_directory import APPLIED
from unmerge.errors import FileError
from unmerge.interop.shards import INDEX, SINGLE, Checkpoint, copy_file
from unmerge.storage.files import read_json
from unmerge.storage.fingerprint import fingerprint


def is_language_checkpoint(directory: Path) -> bool:
    """Whether a directory holds a causal language model as safetensors, and no adapter."""
    held = any((directory / name).is_file() for name in (SINGLE, INDEX))
    if not held or (directory / adapters.CONFIG).is_file():
        return False
    try:
        found = read_json(directory / "config.json", "configuration of a model").get("architectures")
    except (FileError, AttributeError):  # which loading it tells of
        return False
    return isinstance(found, list) and is_causal(list(map(str, found)))


def checksums(directory: Path) -> dict[str, str]:
    """Checksums of all tensors, by their names in the files."""
    checkpoint = Checkpoint.of(directory)
    return {name: fingerprint({name: checkpoint[name]})[name] for name in checkpoint}


def copy(source: Path, target: Path) -> None:
    """Copy a checkpoint with what belongs to it: configuration, index, tokenizer."""
    weights = Checkpoint.of(source).files
    for path in sorted(source.iterdir()):
        if path.name in weights or (path.is_file() and path.suffix in BESIDE and path.name != APPLIED):
            copy_file(path, target / path.name)
