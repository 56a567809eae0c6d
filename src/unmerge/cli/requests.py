"""Which samples to forget and which to keep, from the flags."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from unmerge.cli.data import source_of
from unmerge.cli.images import preprocessing_of
from unmerge.cli.models import Loaded
from unmerge.cli.parts import Filtered, Part, Source
from unmerge.errors import DataError, FileError, listing, suggest

PANEL = "Data"


@dataclass(frozen=True)
class DataOptions:
    """Where the data come from and which of them are to be forgotten."""

    data: Annotated[
        str | None,
        typer.Option(
            metavar="SRC",
            help="All data: a folder of images with a subfolder a class, an .npz (images or inputs, labels), a Hugging "
            "Face dataset on disk (DIR or DIR#split), or package.module:function that returns a loader.",
            rich_help_panel=PANEL,
        ),
    ] = None
    forget: Annotated[
        str | None,
        typer.Option(metavar="label=A,B", help="Forget these classes, by number or name.", rich_help_panel=PANEL),
    ] = None
    forget_ids: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Forget the samples with these numbers, one a line.", rich_help_panel=PANEL),
    ] = None
    forget_data: Annotated[
        str | None, typer.Option(metavar="SRC", help="Forget all of this source.", rich_help_panel=PANEL)
    ] = None
    retain_data: Annotated[
        str | None, typer.Option(metavar="SRC", help="Retain all of this source.", rich_help_panel=PANEL)
    ] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Samples a batch.", rich_help_panel=PANEL)] = 64
    workers: Annotated[int, typer.Option(min=1, help="Threads that decode images.", rich_help_panel=PANEL)] = 4
    image_size: Annotated[
        str | None, typer.Option(metavar="N or HxW", help="Resize images to this size.", rich_help_panel=PANEL)
    ] = None
    pixel_mean: Annotated[
        str | None,
        typer.Option(metavar="X,Y,Z", help="Subtracted from pixels, which are 0 to 1.", rich_help_panel=PANEL),
    ] = None
    pixel_std: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y,Z",
            help="Divides them then. Without these flags a Hugging Face directory's preprocessor_config.json holds.",
            rich_help_panel=PANEL,
        ),
    ] = None

    def check(self) -> None:
        """Refuse what does not go together, before anything is loaded."""
        ways = [name for name in ("forget", "forget_ids", "forget_data") if getattr(self, name) is not None]
        flags = {"forget": "--forget", "forget_ids": "--forget-ids", "forget_data": "--forget-data"}
        if len(ways) > 1:
            raise typer.BadParameter(f"{' and '.join(flags[way] for way in ways)} each say what to forget; give one.")
        if not ways:
            raise typer.BadParameter(
                'say what to forget: --forget "label=3,5", --forget-ids FILE or --forget-data SRC.'
            )
        if self.forget_data is None and self.data is None:
            raise typer.BadParameter(f"{flags[ways[0]]} picks samples out of --data SRC, which is missing.")
        if self.forget_data is None and self.retain_data is not None:
            raise typer.BadParameter(
                f"--retain-data goes with --forget-data; {flags[ways[0]]} retains the rest of --data."
            )
        if self.forget_data is not None and (self.data is not None or self.retain_data is None):
            raise typer.BadParameter("--forget-data SRC goes with --retain-data SRC, and not with --data.")
        if self.forget is not None:
            self.wanted_labels()
        self.size()
        for name in ("pixel_mean", "pixel_std"):
            self.numbers(name)

    def wanted_labels(self) -> list[str]:
        """The labels of --forget as they were typed."""
        assert self.forget is not None
        key, equals, values = self.forget.partition("=")
        found = [value.strip() for value in values.split(",")]
        if key.strip() != "label" or not equals or not all(found):
            hint = "" if equals or ":" in key else f" Did you mean --forget label={key}?"
            raise typer.BadParameter(
                f"--forget {self.forget!r} is not of the form label=3 or label=3,5 or label=cat.{hint}"
            )
        return list(dict.fromkeys(found))

    def size(self) -> tuple[int, int] | None:
        if self.image_size is None:
            return None
        height, _, width = self.image_size.lower().partition("x")
        if not (height.isdecimal() and (width or height).isdecimal() and int(height) and int(width or height)):
            raise typer.BadParameter(f"--image-size {self.image_size!r} is not of the form 224 or 224x160.")
        return int(height), int(width or height)

    def numbers(self, name: str) -> tuple[float, ...]:
        given = getattr(self, name)
        try:
            return () if given is None else tuple(float(value) for value in given.split(","))
        except ValueError as error:
            flag = "--" + name.replace("_", "-")
            raise typer.BadParameter(f"{flag} {given!r} is not of the form 0.5 or 0.485,0.456,0.406.") from error


@dataclass(frozen=True)
class Requested:
    """Batches to forget and to retain, and what to call them."""

    forget: Any
    retain: Any
    description: str
    names: dict[int, str] = field(default_factory=dict)
    identity: str | None = None  # of all the data, for what was collected from it before


def requested(options: DataOptions, model: Loaded) -> Requested:
    """The two parts that the flags name; the sources are opened, no batch is read."""
    options.check()
    if options.forget_data is not None:
        assert options.retain_data is not None
        forget, retain = (opened(source, options, model) for source in (options.forget_data, options.retain_data))
        names = model.names or _names(forget) or _names(retain)
        identities = [getattr(source, "identity", None) for source in (forget, retain)]
        return Requested(
            all_of(forget, options.batch_size),
            all_of(retain, options.batch_size),
            f"all of {options.forget_data}",
            names,
            " ".join(map(str, identities)) if all(identities) else None,
        )
    assert options.data is not None
    source = opened(options.data, options, model)
    names = model.names or _names(source)
    if options.forget is not None:
        return _by_label(options, source, names)
    return _by_place(options, source, names)


def opened(reference: str, options: DataOptions, model: Loaded) -> Source | Iterable[Any]:
    """A source, with its images prepared for the model."""
    prepare = preprocessing_of(
        model.module, model.directory, options.size(), options.numbers("pixel_mean"), options.numbers("pixel_std")
    )
    return source_of(reference, prepare, model.names, options.workers)


def all_of(source: Any, batch_size: int) -> Any:
    return Part(source, range(len(source)), batch_size) if isinstance(source, Source) else source


def _names(source: Any) -> dict[int, str]:
    return dict(getattr(source, "names", {}) or {})


def _by_label(options: DataOptions, source: Any, names: dict[int, str]) -> Requested:
    wanted = [_label(value, names) for value in options.wanted_labels()]
    shown = ", ".join(names.get(label, str(label)) for label in wanted)
    description = f"{'class' if len(wanted) == 1 else 'classes'} {shown} of {options.data}"
    if not isinstance(source, Source):
        return Requested(Filtered(source, wanted, True), Filtered(source, wanted, False), description, names)
    labels = source.known_labels(str(options.data)).tolist()
    present = sorted(set(labels))
    absent = [label for label in wanted if label not in present]
    if absent:
        raise DataError(
            f"no sample of {options.data} has the label {listing(map(str, absent))}; there are {_span(present)}."
        )
    if len(wanted) == len(present):
        raise DataError(f"--forget names every label of {options.data}, so nothing is left to retain.")
    chosen = set(wanted)
    forget, retain = (
        Part(source, [place for place, label in enumerate(labels) if (label in chosen) == keep], options.batch_size)
        for keep in (True, False)
    )
    return Requested(forget, retain, description, names, source.identity)


def _by_place(options: DataOptions, source: Any, names: dict[int, str]) -> Requested:
    path = options.forget_ids
    assert path is not None
    if not isinstance(source, Source):
        raise DataError("--forget-ids needs data with numbered samples: an .npz, a folder or a dataset on disk.")
    places = _read_places(path, len(source))
    if len(places) == len(source):
        raise DataError(f"{path} names every sample, so nothing is left to retain.")
    rest = [place for place in range(len(source)) if place not in places]
    forget, retain = (Part(source, chosen, options.batch_size) for chosen in (sorted(places), rest))
    return Requested(forget, retain, f"{len(places)} samples of {options.data}", names, source.identity)


def _read_places(path: Path, count: int) -> set[int]:
    try:
        lines = path.read_text().splitlines()
    except FileNotFoundError as error:
        raise FileError(f"there is no file {path}.") from error
    except UnicodeDecodeError as error:
        raise FileError(f"{path} is no text: expected one number a line.") from error
    places = set()
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        if not text.isdecimal() or int(text) >= count:
            raise DataError(f"{path}, line {number}: {text!r} is not the number of a sample, from 0 to {count - 1}.")
        places.add(int(text))
    if not places:
        raise DataError(f"{path} names no sample: expected one number a line.")
    return places


def _label(value: str, names: dict[int, str]) -> int:
    place = next((place for place, name in names.items() if name == value), None)
    if place is not None:
        return place
    try:
        return int(value)
    except ValueError:
        hint = suggest(value, names.values()) if names else "The classes have no names here: give their numbers."
        raise DataError(f"there is no class {value!r}. {hint}") from None


def _span(labels: list[int]) -> str:
    if len(labels) > 12:
        return f"{len(labels)} labels from {labels[0]} to {labels[-1]}"
    return ", ".join(map(str, labels))
