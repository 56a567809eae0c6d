"""Many requests on one checkpoint: one pass over all data, then none, and edits that add up and come out again.

python examples/many_requests.py
"""

import tempfile
from pathlib import Path

import unmerge
from unmerge.bench.digits import load_digits, train
from unmerge.measures import accuracy


def main(epochs: int = 20) -> None:
    images, _ = load_digits()
    model = train(images, epochs=epochs)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.safetensors"
        unmerge.collect(model, images.loader()).save(path)
        everything = unmerge.Statistics.load(path)

        edits = {}
        for digit in (3, 8):  # the second request comes when the first edit is in place
            edits[digit] = unmerge.fit(model, classes=[digit], statistics=everything, init="zero")
            edits[digit].apply(model)
            edits[digit].save(Path(folder) / f"forget-{digit}")
        show("3 and 8 forgotten", model, images)

        edits[3].revert(model)
        show("3 is back", model, images)
        edits[8].revert(model)

        both = unmerge.compose([unmerge.Edit.load(Path(folder) / f"forget-{digit}") for digit in (3, 8)])
        with both.applied(model):
            show("both as one edit", model, images)
    show("as it was", model, images)


def show(title: str, model, images) -> None:
    shares = {digit: accuracy(model, images.only(digit).loader()) for digit in (3, 8)}
    rest = accuracy(model, images.without(3, 8).loader())
    print(f"{title:18} 3: {shares[3]:.2f}   8: {shares[8]:.2f}   others: {rest:.2f}")


if __name__ == "__main__":
    main()
