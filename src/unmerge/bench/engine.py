"""Time and memory of the engine beside a plain forward pass, in one run.

    python -m unmerge.bench.engine                              # ResNet-18, two CPU cores, a few minutes
    python -m unmerge.bench.engine --device cuda --model resnet50 --images 50000 --forget 2500

A request = statistics of what is read, bases and solve. The first request reads everything (S): the forget set F and
the rest. The next one on the same checkpoint reads only its F, a class request nothing. Recalibration is not included.
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

import unmerge
from unmerge.bases import pca
from unmerge.bench.images import Batches, half_precision
from unmerge.bench.networks import cifar_resnet
from unmerge.eigen import captured
from unmerge.files import load_weights
from unmerge.layers import candidates
from unmerge.normalization import batch_norms, evaluating, recalibrate

Result = TypeVar("Result")

SOLVE_REPEATS = 3  # the best of which is printed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["resnet18", "resnet50"], default="resnet18")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=5000, help="size of S (default: 5000)")
    parser.add_argument("--forget", type=int, default=500, help="size of F, a part of S (default: 500)")
    parser.add_argument("--batch", type=int, help="images a batch (default: 250; 2500 on cuda)")
    parser.add_argument("--data", type=Path, help="an .npz of images (n, 32, 32, 3) and labels (default: random)")
    parser.add_argument("--weights", type=Path, help="the model's weights as safetensors (default: untrained)")
    parser.add_argument("--basis", default="auto", help="of the recipe whose requests are timed (default: auto)")
    parser.add_argument("--no-eigh", action="store_true", help="leave out the comparison with full float64 eigh")
    options = parser.parse_args()
    if not 0 < options.forget < options.images:
        parser.error(f"--forget {options.forget} is a part of --images {options.images}: name fewer than these.")
    device = torch.device(options.device)
    torch.manual_seed(0)

    machine = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(f"{options.model}, {options.images:,} images, {machine}, torch {torch.__version__}")
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
    forward = half_precision if device.type == "cuda" else None
    recipe = unmerge.Recipe(basis=options.basis)
    measure(model, everything, forget, rest, forward, device, recipe, not options.no_eigh)


def measure(
    model: nn.Module,
    everything: Batches,
    forget: Batches,
    rest: Batches,
    forward: Any,
    device: torch.device,
    recipe: unmerge.Recipe,
    with_eigh: bool,
) -> None:
    """Print the seconds of each step and their ratios."""

    def timed(work: Callable[[], Result], repeats: int = 1) -> tuple[Result, float]:
        best = float("inf")
        for _ in range(repeats):
            _synchronize(device)
            start = time.perf_counter()
            result = work()
            _synchronize(device)
            best = min(best, time.perf_counter() - start)
        return result, best

    layers = edited_layers(model)
    warm = 3 if device.type == "cuda" else 1

    def collect(data: Batches, like: Any = layers) -> unmerge.Statistics:
        return unmerge.collect(model, data, like, forward=forward)

    def both() -> tuple[unmerge.Statistics, unmerge.Statistics]:
        first = collect(forget)
        return first, collect(rest, first)

    collect(forget)  # the first call of a process is slow
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    _, plain = timed(lambda: plain_forward(model, everything, forward), warm)
    _, plain_forget = timed(lambda: plain_forward(model, forget, forward), warm)
    before = _peak_memory(device)
    (part, retain), passes = timed(both, warm)
    edit, fit_seconds = timed(lambda: unmerge.fit(model, part, retain, init="zero", recipe=recipe), SOLVE_REPEATS)
    memory = _peak_memory(device)
    whole = part + retain
    print(f"\nplain forward over S              {plain:9.3f} s")
    print(f"plain forward over F              {plain_forget:9.3f} s")
    print(f"first request: passes             {passes:9.3f} s   {passes / plain:.2f}x a plain forward")
    print(f"               bases and solve    {fit_seconds:9.3f} s")
    print(f"               in all             {passes + fit_seconds:9.3f} s   {(passes + fit_seconds) / plain:.2f}x")
    if device.type == "cuda":
        _print_matrix_rate(whole, passes - plain, timed)

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.safetensors"
        _, save_seconds = timed(lambda: whole.save(path))
        loaded, load_seconds = timed(lambda: unmerge.Statistics.load(path, device))
        megabytes = path.stat().st_size / 2**20
    print(f"statistics of S on disk           {megabytes:9.0f} MiB   ", end="")
    print(f"(saved in {save_seconds:.2f} s, read in {load_seconds:.2f} s)")
    following, next_part = timed(lambda: collect(forget, loaded), warm)

    def next_edit() -> unmerge.Edit:
        return unmerge.fit(model, following, loaded - following, init="zero", recipe=recipe)

    next_made, next_fit = timed(next_edit, SOLVE_REPEATS)
    print(f"next request:  pass over F        {next_part:9.3f} s   {next_part / plain_forget:.2f}x a plain forward")
    print(f"               in all             {next_part + next_fit:9.3f} s   (factors of S cached)")
    print(f"               seconds a phase    {next_made.provenance['seconds']}")
    for basis in ("blend", "lda", "private-mean"):
        recipe = unmerge.Recipe(basis=basis)
        label = sorted(whole.classes)[0]

        def from_classes(recipe: unmerge.Recipe = recipe, label: int = label) -> unmerge.Edit:
            return unmerge.fit(model, classes=[label], statistics=whole, init="zero", recipe=recipe)

        from_classes()
        _, seconds = timed(from_classes, warm)
        print(f"class request: {basis:18} {seconds:9.3f} s   (factors of S cached)")
    _, apply_seconds = timed(lambda: edit.revert(edit.apply(model, alpha=1.0)))
    print(f"apply and revert                  {apply_seconds:9.3f} s")
    print(f"peak memory                       {memory / 2**30:9.2f} GiB   (plain forward {before / 2**30:.2f})")
    if with_eigh:
        lda = unmerge.Recipe(basis="lda")  # whose bases hold the leading eigenvectors, as eigh's do
        _, lda_seconds = timed(lambda: unmerge.fit(model, part, retain, init="zero", recipe=lda), SOLVE_REPEATS)
        compare_with_eigh(retain, edit, {edit.recipe.basis: fit_seconds, "lda": lda_seconds}, timed)


def compare_with_eigh(
    retain: unmerge.Statistics, edit: unmerge.Edit, own: dict[str, float], timed: Callable[..., Any]
) -> None:
    """Full float64 eigendecompositions of the same matrices against the request's bases and solve."""
    seconds, worst = 0.0, 1.0
    for name in edit.layers:
        scatter = retain[name].moments.scatter.double()
        # As often as the request's own solve, of which the best time counts too.
        (_, vectors), one = timed(lambda scatter=scatter: torch.linalg.eigh(scatter), SOLVE_REPEATS)
        seconds += one
        found = pca(retain[name].moments.scatter, edit.recipe.retain_rank)
        best = vectors[:, -found.shape[1] :]
        worst = min(worst, (captured(scatter, found) / captured(scatter, best)).item())
    times = ", ".join(f"{seconds / one:.1f}x bases and solve of {basis} ({one:.3f} s)" for basis, one in own.items())
    print(f"float64 eigh of the same matrices {seconds:9.3f} s   {times}")
    print(f"captured energy, worst layer      {100 * worst:9.4f} %")


def _print_matrix_rate(whole: unmerge.Statistics, seconds: float, timed: Callable[..., Any]) -> None:
    """How near the Gram products come to the rate of a large product, all time beyond a plain forward being theirs."""
    # Half of each symmetric product; layers that share their input share one.
    shapes = {id(layer): (layer.moments.n, layer.moments.mean.numel()) for layer in whole.layers.values()}
    operations = sum(rows * width**2 for rows, width in shapes.values())
    size = 8192
    square = torch.randn(size, size, device="cuda", dtype=torch.bfloat16)
    _, one = timed(lambda: square @ square, 5)
    peak = 2 * size**3 / one
    rate = operations / seconds
    print(
        f"               Gram products      {operations / 1e12:9.1f} TFLOP in {seconds:.3f} s beyond the forward: ",
        end="",
    )
    print(f"{rate / 1e12:.0f} TFLOP/s, {100 * rate / peak:.0f} % of the measured {peak / 1e12:.0f}")


def edited_layers(model: nn.Module) -> list[str]:
    """ResNet-18: the last stage and the head; ResNet-50: what skip_layers=40 takes, layer3.5 on."""
    names = list(candidates(model))
    stages = [name.split(".")[3] if "stages" in name else "" for name in names]
    blocks = [name.split(".")[5] if "stages" in name else "" for name in names]
    deep = len(names) > 40
    return [
        name
        for name, stage, block in zip(names, stages, blocks, strict=True)
        if stage == "3" or (deep and stage == "2" and block == "5") or "classifier" in name
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


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
