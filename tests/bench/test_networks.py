"""A trunk with torchvision's names, whatever stands before them, becomes the benchmark's ResNet."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from unmerge.bench.networks import cifar_resnet, load_trunk
from unmerge.bench.packaged import packaged
from unmerge.errors import FileError, InitError


def torchvision_name(name: str) -> str | None:
    """resnet.encoder.stages.3.layers.2.layer.2.normalization.weight -> layer4.2.bn3.weight"""
    parts = name.split(".")
    if parts[1:4] == ["embedder", "embedder", "normalization"]:
        return ".".join(["bn1", *parts[4:]])
    if parts[1:3] != ["encoder", "stages"]:
        return None
    block = f"layer{int(parts[3]) + 1}.{parts[5]}"
    if parts[6] == "shortcut":
        return ".".join([block, "downsample", "0" if parts[7] == "convolution" else "1", *parts[8:]])
    kind = "conv" if parts[8] == "convolution" else "bn"
    return ".".join([block, f"{kind}{int(parts[7]) + 1}", *parts[9:]])


def trunk(prefix: str = "") -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The weights of a random network under their own and under torchvision's names."""
    torch.manual_seed(1)
    own = {name: torch.rand_like(value.float()) for name, value in cifar_resnet("resnet50", 10).state_dict().items()}
    named = {f"{prefix}{other}": own[name] for name in own if (other := torchvision_name(name)) is not None}
    return own, named | {f"{prefix}fc.weight": torch.zeros(2, 3), f"{prefix}conv1.weight": torch.zeros(64, 3, 7, 7)}


@pytest.mark.parametrize("prefix", ["", "module.pre."])
def test_everything_but_the_stem_and_the_classifier_comes_from_the_trunk(prefix: str) -> None:
    own, named = trunk(prefix)
    model = cifar_resnet("resnet50", 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    load_trunk(model, named)
    for name, value in model.state_dict().items():
        is_new = "embedder.convolution" in name or name.startswith("classifier")
        expected = before[name] if is_new else own[name].to(value.dtype)
        assert torch.equal(value, expected), name


def test_another_network_is_refused_by_the_names_that_it_lacks() -> None:
    _, named = trunk()
    del named["layer4.2.bn3.weight"]
    named["layer1.0.conv1.weight"] = torch.zeros(1, 1, 1, 1)
    with pytest.raises(InitError, match=r"stages\.3\.layers\.2\.layer\.2.*") as error:
        load_trunk(cifar_resnet("resnet50", 10), named)
    assert "stages.0.layers.0.layer.0.convolution.weight" in str(error.value)


def test_a_package_that_is_not_there_says_what_to_type() -> None:
    with pytest.raises(FileError, match="pip install this"):
        packaged("no_such_package", "*.pth", "Type: pip install this.")
    assert packaged("unmerge", "version.py", "").name == "version.py"
