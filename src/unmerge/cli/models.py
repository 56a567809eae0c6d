"""A model reference: a Hugging Face directory, or `package.module:function`; either with `@weights.safetensors`."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import torch
import typer
from torch import nn

from unmerge.cli import adapters
from unmerge.errors import FileError, InitError, listing, suggest
from unmerge.model.initial import Init
from unmerge.storage.files import load_weights

FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
PANEL = "Model"


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and where it runs."""

    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="REF",
            help="A Hugging Face directory (a classifier, a causal language model or a PEFT adapter of one), or "
            "package.module:function that returns a module (imported from the current directory too).",
            rich_help_panel=PANEL,
        ),
    ]
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Weights to load into the model: safetensors, or what torch.load reads with weights_only. The same "
            "as --model REF@FILE.",
            rich_help_panel=PANEL,
        ),
    ] = None
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1, ... or auto.", rich_help_panel=PANEL, metavar="NAME")
    ] = "auto"


@dataclass(frozen=True)
class Loaded:
    """A model and where it came from."""

    module: nn.Module
    reference: str
    directory: Path | None = None  # of a Hugging Face model
    weights: Path | None = None  # a file that was loaded into it
    names: dict[int, str] = field(default_factory=dict)  # of classes, where the model has any
    base: Path | None = None  # of an adapter, which the directory then is

    @property
    def typed(self) -> str:
        """What to type to have it again."""
        return self.reference if self.weights is None else f"{self.reference}@{self.weights}"

    @property
    def files(self) -> Path | None:
        """Where its weights lie on disk, if they lie there as they are."""
        return self.weights or self.directory

    def start(self, init: str) -> str:
        """What --init stands for: an adapter's base in place of the default."""
        return init if self.base is None or init != "zero" else str(self.base)


def load(reference: str, weights: Path | None = None, device: str = "auto") -> Loaded:
    """The model that a reference names."""
    place = Path(reference).expanduser()
    if weights is None and "@" in reference and not place.exists():
        reference, _, file = reference.rpartition("@")
        place, weights = Path(reference).expanduser(), Path(file).expanduser()
    if place.is_dir():
        found = _hugging_face(reference, place)
    elif FUNCTION.fullmatch(reference):
        found = Loaded(module_of(call(reference), reference), reference)
    elif place.is_file():
        raise FileError(
            f"{place} is a file, and weights alone are no model. Pass the directory of a Hugging Face model, or "
            f"package.module:function with --weights {place}."
        )
    else:
        raise FileError(f"there is no model {reference!r}: {_expected(reference)}")
    if weights is not None:
        _load_weights(found.module, weights)
        found = replace(found, weights=weights)
    found.module.to(device_named(device)).eval()
    return found


def _expected(reference: str) -> str:
    """What to type in place of a reference that names nothing."""
    file, colon, function = reference.rpartition(":")
    if colon and file.endswith(".py"):
        return f"a function is named by its module: {'.'.join(Path(file).with_suffix('').parts)}:{function}."
    return (
        "expected a directory that exists, or package.module:function. Nothing is downloaded: of a model from a hub "
        "pass the directory that save_pretrained wrote."
    )


def initial(reference: str) -> Init:
    """What --init names: "zero", a checkpoint on disk, or the module that a function returns."""
    place = Path(reference).expanduser()
    if reference == "zero" or place.exists():
        return reference if reference == "zero" else place
    if FUNCTION.fullmatch(reference.partition("@")[0]):
        return load(reference, device="cpu").module
    raise InitError(f"init={reference!r} is not 'zero', a checkpoint that exists, or package.module:function.")


def call(reference: str) -> Any:
    """What `package.module:function` returns; it is imported because the user typed it."""
    module_name, _, name = reference.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            file = Path(*module_name.split(".")).with_suffix(".py")
            raise FileError(
                f"there is no module {error.name!r} to import, neither installed nor in {here}. For {reference} type "
                f"this where {file} lies below, or install its package."
            ) from error
        raise
    function: Callable[[], Any] | None = getattr(module, name, None)
    if function is None:
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise FileError(f"{module_name} has no function {name!r}. {suggest(name, known) if known else ''}".strip())
    if not callable(function):
        raise FileError(f"{reference} is a {type(function).__name__}; expected a function without arguments.")
    return function()


def module_of(value: Any, reference: str) -> nn.Module:
    if not isinstance(value, nn.Module):
        raise FileError(f"{reference} returned a {type(value).__name__}; expected an nn.Module.")
    return value


def device_named(name: str) -> str:
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        why = shorten(str(error).splitlines()[0], 120, placeholder=" ...")
        raise typer.BadParameter(f"--device {name} ({why}): expected {listing(_devices())} or auto.") from error
    return name


def _devices() -> list[str]:
    """Where a model can be put on this machine."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return (
        ["cpu"] if found is None else ["cpu", *(f"{found.type}:{n}" for n in range(torch.accelerator.device_count()))]
    )


def transformers() -> Any:
    """The library, quiet; its absence is answered with what to type."""
    try:
        import transformers as library
    except ModuleNotFoundError as error:
        raise FileError("a Hugging Face directory needs transformers. Type: pip install 'unmerge[hf]'") from error
    library.utils.logging.set_verbosity_error()
    library.utils.logging.disable_progress_bar()
    return library


def is_causal(architectures: Sequence[str]) -> bool:
    """Whether a configuration names a causal language model."""
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)


def _hugging_face(reference: str, directory: Path) -> Loaded:
    base = adapters.base_of(directory)
    if base is not None:
        plain = _hugging_face(str(base), base)
        module = adapters.merged_into(plain.module, directory)
        return replace(plain, module=module, reference=reference, directory=directory, base=base)
    if not (directory / "config.json").is_file():
        raise FileError(
            f"{directory} is not a Hugging Face model: it has no config.json. For another kind of model pass "
            "package.module:function with --weights."
        )
    library = transformers()
    try:
        # Never code that lies in the directory: only what the user types is run.
        config = library.AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        kind = _class_of(library, config, directory)
        module, info = kind.from_pretrained(directory, local_files_only=True, output_loading_info=True)
    except FileError:
        raise
    except Exception as error:  # transformers raises many kinds for a damaged directory
        raise FileError(f"{directory} cannot be loaded as a model: {error}") from error
    absent = [*info["missing_keys"], *(str(key) for key in info["mismatched_keys"])]
    if absent:
        raise FileError(f"the weights in {directory} lack {listing(sorted(absent))} of {kind.__name__}.")
    names = {int(place): str(name) for place, name in (config.id2label or {}).items()}
    if all(name == f"LABEL_{place}" for place, name in names.items()):
        names = {}
    return Loaded(module, reference, directory, names=names)


def _class_of(library: Any, config: Any, directory: Path) -> Any:
    """The classifier or language model that the configuration names."""
    for name in config.architectures or []:
        if ("Classification" in name or is_causal([name])) and hasattr(library, name):
            return getattr(library, name)
    found = listing(config.architectures or ["no architecture"])
    raise FileError(
        f"{directory} holds {found}, which is no classifier or causal language model of transformers "
        f"{library.__version__}. Pass package.module:function that returns the model."
    )


def _load_weights(module: nn.Module, path: Path) -> None:
    if path.is_dir():
        path = next((path / name for name in _WEIGHTS if (path / name).is_file()), path / _WEIGHTS[0])
    state = load_weights(path)
    try:
        module.load_state_dict(state)
    except RuntimeError as error:
        raise FileError(f"{path} does not fit {type(module).__name__}: {_short(error)}") from error


def _short(error: RuntimeError) -> str:
    lines = [line.strip() for line in str(error).splitlines()[1:]] or [str(error)]
    return " ".join(line if len(line) < 300 else line[:300] + " ..." for line in lines)
