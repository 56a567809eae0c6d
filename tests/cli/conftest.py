"""Real digits on disk and two models that were trained on them, once for all tests of the command."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cli_place import MODELS, RESNET, SMALL, WORDS, Command, Place, Result, as_bytes, environment, train
from torch import nn

from unmerge.bench.digits import Split, load_digits, network


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """models.py, w.safetensors, train.npz, test.npz, plain.npz, images/, resnet/ and ids.txt."""
    from PIL import Image
    from safetensors.torch import save_file
    from transformers import ResNetConfig, ResNetForImageClassification

    folder = tmp_path_factory.mktemp("place")
    train_split, test_split = load_digits()
    for name, split in (("train", train_split), ("test", test_split)):
        np.savez(folder / f"{name}.npz", images=split.images.numpy(), labels=split.labels.numpy())
    np.savez(folder / "plain.npz", inputs=train_split.images.numpy())
    (folder / "models.py").write_text(MODELS)
    (folder / "ids.txt").write_text("# some samples\n" + "\n".join(map(str, range(0, 120, 2))) + "\n")

    small = network()
    train(small, train_split, 5, train_split.images)
    save_file(small.state_dict(), folder / "w.safetensors")

    few = Split(train_split.images[:600], train_split.labels[:600])
    for place, (image, label) in enumerate(zip(as_bytes(few.images), few.labels.tolist(), strict=True)):
        (folder / "images" / WORDS[label]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / "images" / WORDS[label] / f"{place:04}.png")

    torch.manual_seed(0)
    config = ResNetConfig(
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        id2label=dict(enumerate(WORDS)),
        label2id={word: place for place, word in enumerate(WORDS)},
    )
    resnet = ResNetForImageClassification(config)
    pixels = torch.from_numpy(as_bytes(few.images)).float().div(255).unsqueeze(1).expand(-1, 3, -1, -1)
    pixels = nn.functional.interpolate(pixels, size=16, mode="bilinear")
    train(resnet, few, 12, (pixels - 0.5) / 0.5)
    resnet.save_pretrained(folder / "resnet")
    processor = {
        "image_processor_type": "ConvNextImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": 16},
        "crop_pct": 1.0,
        "resample": 2,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "resnet" / "preprocessor_config.json").write_text(json.dumps(processor))
    return Place(folder)


@pytest.fixture(scope="session")
def unmerge(place: Place) -> Command:
    """The command in a process of its own, started in the folder."""

    def run(*arguments: object, more: dict[str, str] | None = None, **options: Any) -> Result:
        # The installed command where there is one; a source tree alone has the module.
        script = Path(sys.executable).with_name("unmerge")
        command = [str(script)] if script.is_file() else [sys.executable, "-m", "unmerge"]
        command += map(str, arguments)
        around = environment() | (more or {})
        done = subprocess.run(
            command, cwd=place.folder, env=around, capture_output=True, text=True, timeout=300, **options
        )
        return Result(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def small_run(place: Place, unmerge: Command) -> tuple[Path, Result]:
    """A class of an .npz forgotten by a model of the user's own."""
    result = unmerge("run", *SMALL, "--data", "train.npz", "--forget", "label=3", "--out", "small-run", "--json")
    assert result.code == 0, result.err
    return place / "small-run", result


@pytest.fixture(scope="session")
def resnet_run(place: Place, unmerge: Command) -> tuple[Path, Result]:
    """Two classes of an image folder forgotten by a Hugging Face model."""
    result = unmerge("run", *RESNET, "--forget", "label=three,five", "--out", "resnet-run")
    assert result.code == 0, result.err
    return place / "resnet-run", result


@pytest.fixture
def here(place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The same command in this process, for what ends early and needs no process of its own."""
    from unmerge.cli import main

    monkeypatch.chdir(place.folder)
    monkeypatch.setenv("COLUMNS", "400")

    def run(*arguments: object) -> Result:
        capsys.readouterr()
        code = main(list(map(str, arguments)))
        found = capsys.readouterr()
        return Result(code, found.out, found.err)

    return run
