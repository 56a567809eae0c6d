"""A model reference that is a PEFT adapter: its base with the adapter merged."""

from __future__ import annotations

from pathlib import Path
from textwrap import shorten
from typing import Any

from torch import nn

from unmerge.errors import FileError
from unmerge.storage.files import read_json

CONFIG = "adapter_config.json"
_LONGEST = 400  # characters of what PEFT says


def base_of(directory: Path) -> Path | None:
    """The directory of the base that an adapter was trained on; None where the directory is no adapter."""
    path = directory / CONFIG
    if not path.is_file():
        return None
    found = read_json(path, "configuration of an adapter")
    name = found.get("base_model_name_or_path") if isinstance(found, dict) else None
    if not isinstance(name, str) or not name:
        raise FileError(f"{path} does not say which base the adapter was trained on (base_model_name_or_path).")
    base = Path(name).expanduser()
    if not base.is_dir():
        raise FileError(
            f"{path} names the base {name!r}, which is no directory here. Put the path of the base there, as "
            "base_model_name_or_path."
        )
    return base


def merged_into(base: nn.Module, directory: Path) -> nn.Module:
    """The base, which is taken apart for it, with the adapter in its weights."""
    try:
        from peft import PeftModel
    except ModuleNotFoundError as error:
        raise FileError(f"{directory} is a PEFT adapter. Type: pip install 'unmerge[hf]'") from error
    from unmerge.interop.peft import merged

    unloaded: Any = base
    try:
        adapted = PeftModel.from_pretrained(unloaded, str(directory))
    except Exception as error:  # PEFT raises many kinds for a damaged directory
        why = shorten(str(error), _LONGEST, placeholder=" ...")
        raise FileError(
            f"{directory} cannot be loaded as an adapter. Was it trained on another base than the one that its "
            f"{CONFIG} names (base_model_name_or_path)? {why}"
        ) from error
    return merged(adapted, in_place=True)[0]
