"""A Hugging Face vision transformer, and a label set that must stay: no row removed, alpha searched.

python examples/transformers_vit.py
"""

import torch
from torch.utils.data import DataLoader
from transformers import ViTConfig, ViTForImageClassification

import unmerge
from unmerge.bench.digits import Split, load_digits


def main(epochs: int = 30) -> None:
    images, _ = load_digits()
    model = trained(images, epochs)
    forget, retain = batches(images.only(3)), batches(images.without(3))

    edit = unmerge.fit(model, forget, retain, init="zero", recipe=unmerge.Recipe(head="edit"))
    search = unmerge.search_alpha(edit, model, forget, retain=retain)
    print(search)
    edit.apply(model, search.alpha)
    edit.revert(model)


def trained(images: Split, epochs: int) -> ViTForImageClassification:
    """A small transformer for the 8x8 digits, from scratch."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=8, patch_size=2, num_channels=1, num_labels=10,
        hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128,
    )  # fmt: skip
    model = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(epochs):
        for batch in batches(images, shuffle=True):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    return model.eval()


def batches(images: Split, shuffle: bool = False) -> DataLoader:
    samples = [
        {"pixel_values": image, "labels": label} for image, label in zip(images.images, images.labels, strict=True)
    ]
    return DataLoader(samples, batch_size=128, shuffle=shuffle)


if __name__ == "__main__":
    main()
