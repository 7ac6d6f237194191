"""A base model -> its first layers, final norm and LM head as a model of its own: sharing every weight, or a copy."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from medusa_heads import base_model
from medusa_heads.quantization import quantization_of


@torch.no_grad()
def first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The first `num_layers` layers of `model` with its final norm and LM head, as a model of its own that
    shares every weight; `model` is left as it is.

    Raises ValueError with the reason when there are no such layers or they do not run alone.
    """
    layers, inner, name = base_model.decoder_layers(model), base_model.decoder(model), model.config.model_type
    if not 1 <= num_layers <= len(layers):
        raise ValueError(f"num_layers {num_layers}: {name} has {len(layers)} layers, take 1 to {len(layers)} of them")
    lists = [key for key, child in inner.named_children() if isinstance(child, nn.ModuleList) and list(child) == layers]
    if len(lists) != 1 or base_model.text_config(model).num_hidden_layers != len(layers):
        raise ValueError(f"{name} does not keep its layers in one list of its decoder: its first layers cannot be taken as a model")
    config = copy.deepcopy(model.config)
    text = config.get_text_config()
    text.num_hidden_layers = num_layers
    if types := getattr(text, "layer_types", None):
        text.layer_types = list(types)[:num_layers]
    configs = {id(model.config): config, id(base_model.text_config(model)): text}
    part: nn.Module = _shallow_copy(model, configs)
    shortened = part
    path = next(path for path, module in model.named_modules() if module is inner)
    for key in path.split(".") if path else ():
        part._modules[key] = _shallow_copy(getattr(part, key), configs)
        part = getattr(part, key)
    part._modules[lists[0]] = nn.ModuleList(layers[:num_layers])
    _check_first_layers(model, shortened, num_layers)  # type: ignore[arg-type]
    return shortened  # type: ignore[return-value]


@torch.no_grad()
def copy_first_layers(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """The same as a float32 model with weights of its own, on the device of `model`: saved, it loads anywhere.

    Raises ValueError with the reason when there is no such model.
    """
    name = model.config.model_type
    if quantization_of(model.config):
        raise ValueError(f"{name} is quantised: its layers cannot be copied into a model that trains; give the model it was made from")
    shared = first_layers(model, num_layers)
    config = copy.deepcopy(shared.config)
    _shorten_lists(config.get_text_config(), len(base_model.decoder_layers(model)), num_layers)
    try:
        copied = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=model.config._attn_implementation)
        copied.load_state_dict(shared.state_dict())
        copied = copied.to(model.device).eval()
        probe = torch.tensor([[1, 2, 3, 5]], device=model.device) % base_model.vocab_size(model)
        logits, expected = (base_model.compute_logits(m, base_model.forward_hidden(m, probe)).float() for m in (copied, shared))
    except (RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the first {num_layers} layers of {name} do not make a model of their own: {error}") from error
    tolerance = 1e-4 if model.dtype == torch.float32 else 0.05
    if not torch.allclose(logits, expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())):
        raise ValueError(f"the first {num_layers} layers of {name}, as a model of their own, compute something else: take more of them")
    copied.generation_config = copy.deepcopy(model.generation_config)
    return copied


def _shorten_lists(config: Any, num_layers: int, kept: int) -> None:
    """Cuts what a config lists layer by layer: `layer_types`, `no_rope_layers`, `mlp_layer_types`, ..."""
    for name, value in list(vars(config).items()):
        if "layer" in name and isinstance(value, (list, tuple)) and len(value) == num_layers:
            setattr(config, name, value[:kept])


def _shallow_copy(module: nn.Module, configs: dict[int, Any]) -> nn.Module:
    """The same module with a child table of its own; `configs` maps the ids of configs to their replacements."""
    copied: Any = copy.copy(module)
    copied._modules = dict(module._modules)
    if (config := configs.get(id(getattr(module, "config", None)))) is not None:
        copied.config = config
    return copied


def _check_first_layers(model: PreTrainedModel, shortened: PreTrainedModel, num_layers: int) -> None:
    """Raises ValueError unless `shortened` runs and leaves its last layer with what `model` has there."""
    name = model.config.model_type
    outputs: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    probe = torch.tensor([[1, 2, 3, 5]], device=model.device) % base_model.vocab_size(model)
    hook = base_model.decoder_layers(model)[num_layers - 1].register_forward_hook(record)
    try:
        base_model.forward_hidden(model, probe)
        base_model.forward_hidden(shortened, probe)
    except (RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the first {num_layers} layers of {name} do not run without the others: {error}") from error
    finally:
        hook.remove()
    if len(base_model.cache_layer_shapes(shortened)) != num_layers or len(outputs) != 2 or not torch.equal(*outputs):
        raise ValueError(f"the first {num_layers} layers of {name} compute something else without the others: take more of them")
