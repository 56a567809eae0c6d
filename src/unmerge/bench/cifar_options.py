"""The command line of the CIFAR-100 benchmark."""

from __future__ import annotations

import argparse
from pathlib import Path

from unmerge.bench.ablations import ABLATIONS
from unmerge.bench.networks import NETWORKS
from unmerge.bench.options import positive, table_parser


def parser(description: str | None) -> argparse.ArgumentParser:
    data, only = "folder with CIFAR-100 (torchvision's, or mosaics)", "only these rows, such as unmerge 'logit mask'"
    found = table_parser("cifar100", description, data, only)
    found.add_argument(
        "--task", nargs="+", default=["trees"], help="what is forgotten, one request after the other (default: trees)"
    )
    found.add_argument(
        "--init",
        choices=["zero", "pretrained"],
        default="zero",
        help="what training starts from (default: zero, nothing)",
    )
    found.add_argument(
        "--checkpoint",
        type=Path,
        help="for --init pretrained: a ResNet-50 with torchvision's names (default: imgsim's)",
    )
    found.add_argument("--reference", type=int, help="seed of the retrained model (default: that of --seed)")
    found.add_argument(
        "--wrong",
        type=Path,
        help="for --ablate init: another ResNet-50 (default: one trained here on half of the classes)",
    )
    found.add_argument("--network", choices=NETWORKS, default="resnet50", help="(default: resnet50)")
    found.add_argument("--fast", action="store_true", help="30 epochs instead of the paper's 100 (15 for 50)")
    found.add_argument("--epochs", type=positive, help="of training, in place of the schedule's")
    found.add_argument("--ablate", nargs="+", choices=[*ABLATIONS, "init"], default=[], help="further rows")
    found.add_argument("--subset", type=positive, help="only the first images of each class, to try things out")
    found.add_argument(
        "--classes",
        metavar="NAMES",
        help="only these classes and superclasses, such as trees+flowers+wolf, for a machine without a GPU",
    )
    return found
