"""Images as a model's input: what a Hugging Face directory says of it, or the flags."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from unmerge.cli.models import transformers
from unmerge.errors import DataError, FileError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_PREVIEW = 96  # pixels


@dataclass(frozen=True)
class Preprocessing:
    """From pictures to a batch."""

    size: tuple[int, int] | None = None  # height, width
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    channels: int = 3
    processor: Any = None  # a Hugging Face image processor, in place of the above

    def __call__(self, pictures: Sequence[Image]) -> Tensor:
        pictures = [picture.convert("L" if self.channels == 1 else "RGB") for picture in pictures]
        if self.processor is not None:
            found: Tensor = self.processor(images=list(pictures), return_tensors="pt")["pixel_values"]
            return found
        if self.size is not None:
            from PIL.Image import Resampling

            height, width = self.size
            pictures = [picture.resize((width, height), Resampling.BILINEAR) for picture in pictures]
        sizes = {picture.size for picture in pictures}
        if len(sizes) > 1:
            raise DataError(f"the images have {len(sizes)} different sizes. Pass --image-size, for example 224.")
        pixels = np.stack([np.asarray(picture) for picture in pictures])
        return self.normalised(pixels if pixels.ndim == 4 else pixels[..., None])

    def normalised(self, pixels: np.ndarray[Any, Any]) -> Tensor:
        """Bytes (n, height, width, channels) as numbers (n, channels, height, width)."""
        images = torch.from_numpy(np.ascontiguousarray(pixels)).permute(0, 3, 1, 2).float() / 255
        if self.mean or self.std:
            mean, std = (torch.tensor(part).reshape(1, -1, 1, 1) for part in (self.mean or (0.0,), self.std or (1.0,)))
            images = (images - mean) / std
        return images.contiguous()

    @property
    def identity(self) -> str:
        """A text that differs where inputs would."""
        processor = (
            None if self.processor is None else json.dumps(self.processor.to_dict(), sort_keys=True, default=str)
        )
        return repr((self.size, self.mean, self.std, self.channels, processor))


def preprocessing_of(
    module: nn.Module | None,
    directory: Path | None,
    size: tuple[int, int] | None,
    mean: tuple[float, ...],
    std: tuple[float, ...],
) -> Preprocessing:
    """What the flags say; without any, what the model's directory says."""
    first = next((part for part in module.modules() if isinstance(part, nn.Conv2d)), None) if module else None
    channels = 1 if first is not None and first.in_channels == 1 else 3
    for name, values in (("--pixel-mean", mean), ("--pixel-std", std)):
        if len(values) not in (0, 1, channels):
            raise DataError(f"{name} has {len(values)} numbers; the model takes {channels} channels.")
    described = directory is not None and (directory / "preprocessor_config.json").is_file()
    if size is None and not mean and not std and described:
        try:
            processor = transformers().AutoImageProcessor.from_pretrained(directory, local_files_only=True)
        except Exception as error:  # transformers raises many kinds for a damaged file
            raise FileError(f"{directory}/preprocessor_config.json cannot be used: {error}") from error
        return Preprocessing(channels=channels, processor=processor)
    return Preprocessing(size, mean, std, channels)


def opened(path: Path) -> Image:
    """The picture in a file; one that cannot be read is named."""
    from PIL import Image as pillow

    try:
        with pillow.open(path) as picture:
            picture.load()
            return picture.copy()
    except (OSError, SyntaxError, ValueError, pillow.DecompressionBombError) as error:
        raise FileError(f"{path} cannot be read as an image: {error}") from error


def need_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ModuleNotFoundError as error:
        raise FileError("reading images needs pillow. Type: pip install pillow") from error


def picture_of(image: Tensor | np.ndarray[Any, Any]) -> Image | None:
    """An array or a model's input as a picture, where it has the shape of one."""
    try:
        from PIL import Image as pillow
    except ModuleNotFoundError:
        return None
    values = image.detach().cpu().float().numpy() if isinstance(image, Tensor) else np.asarray(image)
    if values.ndim == 3 and values.shape[0] in (1, 3) and values.shape[-1] not in (1, 3):
        values = values.transpose(1, 2, 0)
    if values.ndim == 3 and values.shape[-1] == 1:
        values = values[..., 0]
    if values.ndim not in (2, 3) or (values.ndim == 3 and values.shape[-1] != 3) or min(values.shape[:2]) < 4:
        return None
    if values.dtype != np.uint8:
        low, high = float(values.min()), float(values.max())
        values = ((values - low) / (high - low or 1) * 255).round().astype(np.uint8)
    return pillow.fromarray(values)


def png(picture: Image) -> str:
    """A small PNG in base64."""
    small = picture.convert("RGB")
    small.thumbnail((_PREVIEW, _PREVIEW))
    target = io.BytesIO()
    small.save(target, "PNG", optimize=True)
    return base64.b64encode(target.getvalue()).decode()
