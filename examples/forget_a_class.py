"""Forget one class of a classifier: diagnose, edit, compare with a retrained model.

python examples/forget_a_class.py
"""

import copy

import unmerge
from unmerge.baselines import logit_mask
from unmerge.bench.digits import load_digits, train
from unmerge.evaluation import evaluate


def main(epochs: int = 20) -> None:
    images, test = load_digits()
    model = train(images, epochs=epochs)
    forget, retain = images.only(3).loader(), images.without(3).loader()

    print(unmerge.diagnose(forget, retain, model, init="zero"))

    edit = unmerge.fit(model, forget, retain, init="zero")
    print(edit, *(f"{name}: {why}" for name, why in edit.provenance["choices"].items()), sep="\n  ")
    edited = edit.apply(copy.deepcopy(model), recalibrate=retain, forget=forget)

    retrained = train(images.without(3), seed=1, epochs=epochs)  # what nobody has in practice
    models = {"un-edited": model, "logit mask": logit_mask(model, forget, retain), "unmerge": edited}
    splits = {"forget": forget, "retain": retain, "test": test.loader()}
    print(evaluate(models, retrained, splits, ["accuracy", "entanglement", "fidelity"]))


if __name__ == "__main__":
    main()
