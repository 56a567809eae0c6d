"""merged(): a model that was fine-tuned with a PEFT adapter, as a plain model and the weights from before."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unmerge.distributed.warning import warn
from unmerge.errors import LayerError, listing
from unmerge.interop.lora import PLAIN_STARTS
from unmerge.model.layers import tensor_name


def merged(peft_model: nn.Module, *, in_place: bool = False) -> tuple[nn.Module, dict[str, Tensor]]:
    """The plain model with the active adapters merged, and the `init` for `fit`: what it was without them.

    in_place: take the PeftModel apart instead of a copy, as its merge_and_unload() does; a copy needs the memory of
    the model once more. In `init` only the adapted weights are copies; the others are the model's own tensors.
    """
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    if not isinstance(peft_model, PeftModel):
        raise LayerError(
            f"merged() takes a PeftModel, not a {type(peft_model).__name__}. Type: "
            "PeftModel.from_pretrained(base_model, adapter_directory)"
        )
    _check_mergeable(peft_model)
    wrapped: Any = peft_model if in_place else copy.deepcopy(peft_model)
    if any(isinstance(module, BaseTunerLayer) and module.merged for module in wrapped.modules()):
        wrapped.unmerge_adapter()
    before = dict(_weights_before(wrapped))
    try:
        model: nn.Module = wrapped.merge_and_unload()
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise LayerError(f"PEFT cannot merge this adapter: {error}") from error
    state = model.state_dict()
    before = {name: tensor for name, tensor in before.items() if name in state}
    _check_changed(before, state)
    return model, {**state, **before}


def _check_mergeable(peft_model: Any) -> None:
    """Refuse adapters without weights to merge, and those whose start changed the weights of the base."""
    for name in peft_model.active_adapters:
        config = peft_model.peft_config[name]
        if config.is_prompt_learning or not hasattr(peft_model.base_model, "merge_and_unload"):
            raise LayerError(f"an adapter of type {config.peft_type.value} has no weights that merge into the model.")
        start = getattr(config, "init_lora_weights", True)
        if start not in PLAIN_STARTS or getattr(config, "kasa_config", None):
            raise LayerError(
                f"with init_lora_weights={start!r} the adapter {name!r} changed the base weights before training, so "
                "they are not in this model. Use model = peft_model.merge_and_unload() and init= the base's checkpoint."
            )


def _weights_before(peft_model: Any) -> Iterator[tuple[str, Tensor]]:
    """Copies of the weights that adapters change or replace, by their names in the plain model."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    for name, module in peft_model.get_base_model().named_modules():
        if isinstance(module, BaseTunerLayer):
            base = module.get_base_layer()
        elif isinstance(module, ModulesToSaveWrapper):
            base = module.original_module
        else:
            continue
        for part, parameter in base.named_parameters():
            yield tensor_name(name, part), parameter.detach().clone()


def _check_changed(before: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    """An adapter of another base finds no layer of its name, and PEFT leaves a layer without values as it was."""
    layers = dict.fromkeys(name.rpartition(".")[0] for name in before)
    changed = {name.rpartition(".")[0] for name, tensor in before.items() if not torch.equal(state[name], tensor)}
    idle = [name for name in layers if name not in changed]
    if not changed:
        raise LayerError(
            f"the adapter changes none of the layers that it is attached to ({listing(idle)}): it was never trained, "
            "or made for another base, whose layers have other names."
        )
    if idle:
        warn(f"the adapter leaves {listing(idle)} as they were; was it made for this base?")
