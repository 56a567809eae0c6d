"""Time and memory of the engine beside a plain forward pass, in one run.

    python -m unmerge.bench.engine                              # ResNet-18, two CPU cores, a few minutes
    python -m unmerge.bench.engine --device cuda --model resnet50 --images 50000 --forget 2500

A request = statistics of what is read, bases and solve, timed from end to end and in its parts. The first request reads
everything (S): the forget set F and the rest. The next one on the same checkpoint reads only its F, a class request
nothing. Applying it, with and without recalibration, is timed apart. Each is made several times: the best counts, the
slowest is told.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import unmerge
from unmerge.bench.images import Batches, half_precision
from unmerge.bench.machine import machine_name, versions
from unmerge.bench.networks import NETWORKS, cifar_resnet
from unmerge.bench.stopwatch import Stopwatch, operations
from unmerge.editing.recalibration import recalibrate
from unmerge.evaluation import Column, Evaluation, Figure, Table
from unmerge.linalg.eigen import captured
from unmerge.model.evaluating import batch_norms, evaluating
from unmerge.model.layers import candidates
from unmerge.solving.bases import pca
from unmerge.storage.files import load_weights

REPEATS = 3
_WITH_PASSES = ("first request", "first request: passes", "next request", "next request: pass over F")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=NETWORKS, default="resnet18")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=5000, help="size of S (default: 5000)")
    parser.add_argument("--forget", type=int, default=500, help="size of F, a part of S (default: 500)")
    parser.add_argument("--batch", type=int, help="images a batch (default: 250; 2500 on cuda)")
    parser.add_argument("--data", type=Path, help="an .npz of images (n, 32, 32, 3) and labels (default: random)")
    parser.add_argument("--weights", type=Path, help="the model's weights as safetensors (default: untrained)")
    parser.add_argument("--basis", default="auto", help="of the recipe whose requests are timed (default: auto)")
    parser.add_argument("--out", type=Path, help="folder of the tables (default: they are printed alone)")
    parser.add_argument("--no-eigh", action="store_true", help="leave out the comparison with full float64 eigh")
    options = parser.parse_args()
    if not 0 < options.forget < options.images:
        parser.error(f"--forget {options.forget} is a part of --images {options.images}: name fewer than these.")
    device = torch.device(options.device)
    torch.manual_seed(0)

    if options.data is None:
        images, labels = random_images(options.images)
    else:
        images, labels = images_of(options.data, options.images)
    model = cifar_resnet(options.model, int(labels.max()) + 1)
    size = options.batch or (2500 if device.type == "cuda" else 250)
    everything = Batches(images.to(device, memory_format=torch.channels_last), labels, size)
    forget, rest = everything.part(0, options.forget), everything.part(options.forget)
    if options.weights is None:
        model.to(device)
        # Untrained running statistics would let the activations of deep layers grow without bound.
        recalibrate(model, list(batch_norms(model)), everything.part(0, 2 * size), None)
    else:
        model.load_state_dict(load_weights(options.weights))
        model.to(device)
    tables = measure(model, everything, forget, rest, device, options.basis, not options.no_eigh)
    machine = machine_name(device)
    # Files by name, since where they lie on one machine says nothing on another.
    named = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}
    found = Evaluation(tables, {}, {**named, "seed": 0, "machine": machine, "versions": versions()})
    print(f"{options.model}, {options.images:,} images, {machine}, torch {torch.__version__}\n\n{found}")
    if options.out is not None:
        name = f"{options.model}-{device.type}"
        found.to_json(options.out / f"{name}.json")
        found.to_markdown(options.out / f"{name}.md")
        print(f"\nwritten: {options.out / name}.json and .md")


def measure(
    model: nn.Module, everything: Batches, forget: Batches, rest: Batches, device: torch.device, basis: str, eigh: bool
) -> dict[str, Table]:
    """The seconds of each step, how many operations some launch, and sizes and rates."""
    times, sizes, counts = Stopwatch(device), dict[str, float](), dict[str, float]()
    forward = half_precision if device.type == "cuda" else None
    recipe, layers = unmerge.Recipe(basis=basis), edited_layers(model)
    repeats = REPEATS if device.type == "cuda" else 1  # of what reads all images

    def collect(data: Batches, like: Any = layers) -> unmerge.Statistics:
        return unmerge.collect(model, data, like, forward=forward)

    def fit(step: str, *sources: unmerge.Statistics, **named: Any) -> unmerge.Edit:
        found = unmerge.fit(model, *sources, init="zero", **{"recipe": recipe, **named})
        times.note(step, found.provenance["seconds"])
        return found

    def first_request() -> tuple[unmerge.Statistics, unmerge.Statistics, unmerge.Edit]:
        with times("first request"):
            with times("first request: passes"):
                part = collect(forget)
                retain = collect(rest, part)
            return part, retain, fit("first request", part, retain)

    some = 2 * everything.size
    unmerge.fit(model, collect(forget.part(0, some)), collect(rest.part(0, some)), init="zero", recipe=recipe)  # warm
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times.made("plain forward over S", lambda: plain_forward(model, everything, forward), repeats)
    times.made("plain forward over F", lambda: plain_forward(model, forget, forward), REPEATS)
    sizes["peak memory of a plain forward, GiB"] = _peak_memory(device) / 2**30
    for _ in range(repeats - 1):
        first_request()
    part, retain, edit = first_request()
    sizes["peak memory of the first request, GiB"] = _peak_memory(device) / 2**30
    whole = part + retain
    if device.type == "cuda":
        beyond = times.best("first request: passes") - times.best("plain forward over S")
        sizes |= _matrix_rates(whole, beyond, device)
    if eigh:
        sizes |= _compared_with_eigh(model, part, retain, edit, times)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.safetensors"
        times.made("statistics of S saved", lambda: whole.save(path))
        loaded = times.made("statistics of S read", lambda: unmerge.Statistics.load(path, device))
        sizes["statistics of S on disk, MiB"] = path.stat().st_size / 2**20
    # What depends on S alone is made by the first request and kept with its statistics.
    unmerge.fit(model, part, loaded - part, init="zero", recipe=recipe)
    for _ in range(REPEATS):
        with times("next request"):
            with times("next request: pass over F"):
                part = collect(forget, loaded)
            fit("next request", part, loaded - part)
    counts["plain forward over F"] = operations(lambda: plain_forward(model, forget, forward))
    counts["next request: pass over F"] = operations(lambda: collect(forget, loaded))
    again = partial(unmerge.fit, model, init="zero", recipe=recipe)
    counts["next request: the rest"] = operations(lambda: again(part, loaded - part))
    for own in ("blend", "lda", "private-mean"):
        request: Any = {"classes": [min(whole.classes)], "statistics": whole, "recipe": unmerge.Recipe(basis=own)}
        unmerge.fit(model, init="zero", **request)
        for _ in range(REPEATS):
            with times(f"class request, {own}"):
                fit(f"class request, {own}", **request)
        counts[f"class request, {own}"] = operations(partial(unmerge.fit, model, init="zero", **request))
    times.made("edit applied and reverted", lambda: edit.revert(edit.apply(model, alpha=1.0)), REPEATS)
    # BatchNorms re-estimated and the classifier refitted on up to 10,000 retained images, and none of F.
    times.made(
        "edit applied with recalibration", lambda: edit.apply(model, 1.0, recalibrate=rest, forward=forward), repeats=1
    )
    edit.revert(model)
    beside = {step: f"plain forward over {'S' if step.startswith('first') else 'F'}" for step in _WITH_PASSES}
    return {
        "times": times.table("times", beside, "x forward"),
        "operations": _one_column("operations", counts, digits=0),
        "sizes": _one_column("sizes", sizes, digits=2),
    }


def _one_column(title: str, values: Mapping[str, float], digits: int) -> Table:
    cells = {name: {title: Figure(value)} for name, value in values.items()}
    return Table(title, [Column(title, digits=digits)], cells)


def _compared_with_eigh(
    model: nn.Module, part: unmerge.Statistics, retain: unmerge.Statistics, edit: unmerge.Edit, times: Stopwatch
) -> dict[str, float]:
    """Full float64 eigendecompositions of the same matrices against a request's bases and solve."""
    step, worst = "float64 eigh of the same matrices", 1.0
    alone = Stopwatch(retain[next(iter(edit.layers))].device)
    for name in edit.layers:
        scatter = retain[name].moments.scatter.double()
        _, vectors = alone.made(name, partial(torch.linalg.eigh, scatter), REPEATS)
        found = pca(retain[name].moments.scatter, edit.recipe.retain_rank)
        best = vectors[:, -found.shape[1] :]
        worst = min(worst, (captured(scatter, found) / captured(scatter, best)).item())
    times.seconds[step] = [sum(each) for each in zip(*alone.seconds.values(), strict=True)]
    ratios = {}
    for basis in ("blend", "lda"):  # of which lda's bases hold the leading eigenvectors, as eigh's do
        own = f"bases and solve, {basis}"
        recipe = unmerge.Recipe(basis=basis)
        times.made(own, partial(unmerge.fit, model, part, retain, init="zero", recipe=recipe), REPEATS)
        ratios[f"float64 eigh / {own}"] = times.best(step) / times.best(own)
    return {**ratios, "energy that the bases miss of eigh's, worst layer, per million": 1e6 * (1 - worst)}


def _matrix_rates(whole: unmerge.Statistics, seconds: float, device: torch.device) -> dict[str, float]:
    """How near the Gram products come to the rate of a large product, all time beyond a plain forward being theirs."""
    # Half of each symmetric product; layers that share their input share one.
    shapes = {id(layer): (layer.moments.n, layer.moments.mean.numel()) for layer in whole.layers.values()}
    products = sum(rows * width**2 for rows, width in shapes.values())
    size, product = 8192, Stopwatch(device)
    square = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    product.made("large", lambda: square @ square, 5)
    rate, peak = products / seconds / 1e12, 2 * size**3 / product.best("large") / 1e12
    return {
        "Gram products, TFLOP": products / 1e12,
        "Gram products in the time beyond a plain forward, TFLOP/s": rate,
        "a large product, TFLOP/s": peak,
        "share of its rate that the Gram products reach, %": 100 * rate / peak,
    }


def edited_layers(model: nn.Module) -> list[str]:
    """The last stage and the head; ResNet-50: what skip_layers=40 takes, layer3.5 on."""
    names = list(candidates(model))
    stages = [name.split(".")[3] if "stages" in name else "" for name in names]
    blocks = [name.split(".")[5] if "stages" in name else "" for name in names]
    deep = len(names) > 40
    return [
        name
        for name, stage, block in zip(names, stages, blocks, strict=True)
        if stage == max(stages) or (deep and stage == "2" and block == "5") or "classifier" in name
    ]


def random_images(count: int) -> tuple[Tensor, Tensor]:
    """Random images of ten classes, sorted by label, so that the first are whole classes."""
    return torch.randn(count, 3, 32, 32), torch.arange(count) * 10 // count


def images_of(path: Path, count: int) -> tuple[Tensor, Tensor]:
    """Images (n, 32, 32, 3) of bytes and labels from an .npz file, sorted by label."""
    with np.load(path) as data:
        order = np.argsort(data["labels"], kind="stable")[:count]
        images, labels = torch.from_numpy(data["images"][order]), torch.from_numpy(data["labels"][order]).long()
    pixels = images.permute(0, 3, 1, 2).float() / 255
    return (pixels - pixels.mean((0, 2, 3), keepdim=True)) / pixels.std((0, 2, 3), keepdim=True), labels


def plain_forward(model: nn.Module, data: Batches, forward: Any) -> None:
    with evaluating(model):
        for batch in data:
            model(batch[0]) if forward is None else forward(model, batch)


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
