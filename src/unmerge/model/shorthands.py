"""Short names for the layers of a transformer: "mlp", "attention", "outputs", "last4", "mlp:last4"."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from torch import nn

from unmerge.errors import LayerError

SYNTAX = "'mlp', 'attention', 'outputs', 'last4' (blocks), 'mlp:last4' and the like"

_SHORTHAND = re.compile(r"(?P<kind>mlp|attention|outputs)?(?:(?(kind):|)last(?P<count>\d+))?")
_ATTENTION = re.compile("attn|attention", re.IGNORECASE)


def is_shorthand(entry: str) -> bool:
    return bool(entry) and _SHORTHAND.fullmatch(entry) is not None


def expanded(
    entry: str, model: nn.Module, names: Iterable[str], widths_of: Callable[[str], tuple[int, int]]
) -> list[str]:
    """The names, among those of editable layers, that a shorthand stands for; widths_of: outputs and inputs of a layer.

    "attention": inside a block's attention, "mlp": elsewhere in a block, "outputs": the layers of both whose output the
    block adds to its stream; "last4" keeps the last four blocks.
    """
    found = _SHORTHAND.fullmatch(entry)
    assert found is not None
    blocks = blocks_of(model)
    if not blocks:
        raise LayerError(
            f"layers={entry!r}: {type(model).__name__} has no list of alike blocks, as a transformer has. Name the "
            "layers, or write a pattern: 're:...'."
        )
    if found["count"] is not None:
        count = int(found["count"])
        if not 1 <= count <= len(blocks):
            raise LayerError(f"layers={entry!r}: expected last1 to last{len(blocks)}, one for each block.")
        blocks = dict(list(blocks.items())[-count:])
    attention: dict[str, str] = {}  # of each layer in a block; "" where it is in none
    for name in names:
        block = block_with(name, blocks)
        if block is not None:
            attention[name] = _attention_of(name, block, blocks[block])
    if found["kind"] == "outputs":
        chosen = _writing(attention, widths_of)
    else:
        wanted = {"attention": (True,), "mlp": (False,), None: (True, False)}[found["kind"]]
        chosen = [name for name, own in attention.items() if bool(own) in wanted]
    if not chosen:
        raise LayerError(
            f"layers={entry!r} selects no editable layer of the {len(blocks)} blocks {next(iter(blocks))!r} …"
        )
    return chosen


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of a network by name: the longest list of modules with layers inside.

    Lists inside a block (experts) are parts of it. A Sequential counts when its modules are of one class.
    """
    found: list[dict[str, nn.Module]] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or name.startswith(tuple(inside)):
            continue
        children = {f"{name}.{key}" if name else key: child for key, child in module.named_children()}
        is_list = isinstance(module, nn.ModuleList) or len({type(child) for child in children.values()}) == 1
        if is_list and children and all(_has_weights(child) for child in children.values()):
            found.append(children)
            inside.append(f"{name}." if name else "")
    # Of an encoder and a decoder of the same depth the decoder.
    return max(reversed(found), key=len, default={})


def block_with(name: str, blocks: Mapping[str, nn.Module]) -> str | None:
    """The name of the block that a layer stands in."""
    return next((block for block in blocks if name.startswith(f"{block}.")), None)


def _has_weights(module: nn.Module) -> bool:
    """Whether the module is more than one layer, and some parameter in it is a matrix."""
    return any(True for _ in module.children()) and any(parameter.dim() > 1 for parameter in module.parameters())


def _attention_of(name: str, block: str, module: nn.Module) -> str:
    """The first module on the way from the block down to the layer that calls itself an attention, or nothing."""
    way = block
    for key in name.removeprefix(f"{block}.").split("."):
        module = getattr(module, key, module)
        way = f"{way}.{key}"
        if _ATTENTION.search(key) or _ATTENTION.search(type(module).__name__):
            return way
    return ""


def _writing(attention: Mapping[str, str], widths_of: Callable[[str], tuple[int, int]]) -> list[str]:
    """The last layer as wide as the stream in each attention and in each other module, and its like in all experts."""
    widths = {name: widths_of(name) for name in attention}
    # Most layers of a block read the stream or write to it.
    stream = Counter(width for pair in widths.values() for width in pair).most_common(1)
    parts: dict[str, list[str]] = {}
    for name, own in attention.items():
        if widths[name][0] == stream[0][0]:
            parts.setdefault(own or name.rpartition(".")[0], []).append(name)
    return [name for part in parts.values() for name in part if _numberless(name) == _numberless(part[-1])]


def _numberless(name: str) -> str:
    """A name that all experts of a block share."""
    return re.sub(r"(?<=\.)\d+(?=\.)|\[\d+\]", "#", name)
