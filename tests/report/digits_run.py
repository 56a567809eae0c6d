"""A run directory as `unmerge run` leaves it, from a real edit of a network that knows digits."""

import base64
import io
import time
from copy import deepcopy
from pathlib import Path

import torch

import unmerge
from unmerge.baselines import logit_mask
from unmerge.bench.digits import Split, load_digits, train
from unmerge.evaluation import evaluate
from unmerge.storage.files import write_json
from unmerge.version import VERSION

AXES = ("accuracy", "entanglement", "fidelity", "decodability")


def png(image: torch.Tensor) -> str:
    """One grey image (8, 8) with values from 0 to 1, as the base64 text of a PNG."""
    from PIL import Image

    target = io.BytesIO()
    Image.fromarray((255 * image.clamp(0, 1)).byte().numpy()).save(target, "PNG")
    return base64.b64encode(target.getvalue()).decode()


@torch.no_grad()
def samples(before: torch.nn.Module, after: torch.nn.Module, split: Split, count: int = 8) -> list[dict]:
    images, labels = split.images[:count], split.labels[:count]
    (old, was), (new, now) = (model(images).softmax(1).max(1) for model in (before, after))
    return [
        {
            "png": png(images[place, 0]),
            "label": str(int(labels[place])),
            "before": str(int(was[place])),
            "before_confidence": float(old[place]),
            "after": str(int(now[place])),
            "after_confidence": float(new[place]),
        }
        for place in range(len(labels))
    ]


def write_run(directory: Path, digit: int = 3) -> None:
    """Train, diagnose, fit, search alpha, evaluate, and write what each step found."""
    seconds = {}

    def timed(phase, work):
        start = time.perf_counter()
        result = work()
        seconds[phase] = round(time.perf_counter() - start, 3)
        return result

    everything, test = load_digits()
    images = Split(everything.images[:700], everything.labels[:700])
    forget, retain = images.only(digit), images.without(digit)
    forget_data, retain_data = forget.loader(), retain.loader()
    model, retrained = train(images, epochs=6), train(retain, epochs=4)
    diagnosis = timed("diagnose", lambda: unmerge.diagnose(forget_data, retain_data, model))
    edit = timed("fit", lambda: unmerge.fit(model, forget_data, retain_data, init="zero"))
    found = timed("search", lambda: unmerge.search_alpha(edit, model, forget_data, retain=retain_data, step=0.25))
    edited = edit.apply(deepcopy(model), found.alpha, recalibrate=retain_data)
    models = {"un-edited": model, "logit mask": logit_mask(model, forget_data, retain_data), "unmerge": edited}
    splits = {"forget": forget_data, "retain": retain_data, "test": test.without(digit).loader()}
    evaluation = timed("evaluate", lambda: evaluate(models, retrained, splits, AXES, init="zero", draws=100))
    diagnosis.to_json(directory / "diagnosis.json")
    edit.save(directory / "edit")
    evaluation.to_json(directory / "evaluation.json")
    write_json(directory / "alpha.json", found.to_dict())
    run = {
        "command": f"unmerge run --model digits:network --weights digits.safetensors --forget label={digit}",
        "model": "digits:network",
        "init": "zero",
        "request": f"label={digit}",
        "versions": {"unmerge": VERSION, "torch": torch.__version__},
        "created": "2025-01-31T12:34:56+00:00",
        "seconds": seconds,
        "samples": samples(model, edited, forget),
    }
    write_json(directory / "run.json", run)
