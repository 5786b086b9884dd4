"""Calling a model and finding its output, and the model's device, type and mode."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from gramscope.errors import InputError, LayerError
from gramscope.layers.batches import LABEL_KEYS, first_tensor, tensors_in
from gramscope.layers.modules import differentiable, in_eval_mode, unwrap
from gramscope.layers.select import all_layers
from gramscope.layers.tape import Tape, unseen

#: where the output tensor is: a key, an index, or a function of what the model returns
OutputSelector: TypeAlias = str | int | Callable[[Any], Tensor] | None

_OUTPUT_KEYS = ("logits", "output", "prediction", "predictions", "out", "prediction_outputs", "last_hidden_state")


def call_model(model: nn.Module, inputs: Any, synchronise: bool = False) -> Any:
    """``model(x)`` for a tensor, ``model(*xs)`` for a tuple, ``model(**xs)`` for a mapping.

    Items of a mapping that the model's forward has no argument for are left out (:func:`unused_inputs`). Labels are passed
    where it names them: models of transformers compute their own loss from them, and sequence-to-sequence models their
    decoder's inputs. Language models are told not to cache keys and values, which serve generation alone and cost memory.

    A ``DistributedDataParallel`` model waits for its other processes in every forward pass. It does so only with
    ``synchronise``, for training; else its module runs here alone, so that one process can measure.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel) and not synchronise:
        model = model.module
    try:
        if isinstance(inputs, Mapping):
            unused = unused_inputs(model, inputs)
            cache = {"use_cache": False} if "use_cache" in forward_arguments(model) else {}
            return model(**cache | {key: value for key, value in inputs.items() if key not in unused})
        if isinstance(inputs, tuple | list):
            return model(*inputs)
        return model(inputs)
    except (RuntimeError, TypeError, ValueError) as error:
        remedy = _remedy(model, inputs, str(error))
        if remedy is None:
            raise
        raise InputError(f"{type(model).__name__} cannot run on these inputs: {error}; {remedy}") from error


def unused_inputs(model: nn.Module, inputs: Mapping[str, Any]) -> set[str]:
    """Names among keyword inputs that the model's forward has no argument for: targets of a loss, columns of a table.

    A forward that takes any keyword (``**kwargs``) gets all of them but labels that it does not name.
    """
    arguments = forward_arguments(model)
    unknown = {key for key in inputs if key not in arguments}
    return {key for key in unknown if key in LABEL_KEYS} if "**" in arguments else unknown


def forward_arguments(model: nn.Module) -> frozenset[str]:
    """Names of the arguments of a model's forward, and ``"**"`` if it takes any keyword.

    Of an adapter that hands on everything, those of the model inside as well.
    """
    root = unwrap(model)
    parameters = inspect.signature(root.forward).parameters.values()
    names = frozenset("**" if p.kind is p.VAR_KEYWORD else p.name for p in parameters)
    inner = getattr(root, "get_base_model", None)
    return names | forward_arguments(inner()) if callable(inner) and "labels" not in names else names


def run_captured(model: nn.Module, tape: Tape, inputs: Any) -> Any:
    """Call a model that ``tape`` captures."""
    before = len(tape.calls)
    output = call_model(model, inputs)
    if len(tape.calls) == before:
        raise LayerError(
            f"{type(unwrap(model)).__name__} has a __call__ of its own, which runs no hooks of the model; name it forward"
        )
    return output


def may_compute_loss(model: nn.Module) -> bool:
    """Whether the model takes labels, positions of an answer or values to come, so that it may return a loss of its own."""
    names = forward_arguments(model)
    others = ("start_positions", "future_values", "return_loss")
    return not names.isdisjoint((*LABEL_KEYS, *others)) or any("label" in name for name in names)


def own_loss(returned: Any) -> Tensor | None:
    """The loss that a model computed itself, ``returned.loss`` or ``returned["loss"]``; ``None`` where there is none."""
    loss = returned.get("loss") if isinstance(returned, Mapping) else getattr(returned, "loss", None)
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def _remedy(model: nn.Module, inputs: Any, problem: str) -> str | None:
    """What to do about an error of the model's forward, where its cause can be told."""
    if "argument" in problem and "forward()" in problem:
        return "say what the model takes with unpack=lambda batch: (inputs, target)"
    if "Inference tensors" in problem:
        return "the model was made under torch.inference_mode; copy.deepcopy(model) outside it can be differentiated"
    if any(words in problem for words in ("cannot be multiplied", "size mismatch", "channels, but got")):
        shapes = ", ".join(str(tuple(t.shape)) for t in tensors_in(inputs))
        layer = next(iter(all_layers(model)), None)
        takes = (
            "" if layer is None else f"; its first layer {layer.name!r} has a weight of {tuple(layer.weight().shape)}"
        )
        return f"the inputs have shape {shapes}{takes}"
    first, dtype = first_tensor(inputs), model_dtype(model)
    of_types = any(words in problem for words in ("dtype", "scalar type", "Input type", "not implemented for"))
    if not of_types or first is None or dtype is None or (first.dtype == dtype and "indices" not in problem):
        return None
    if "indices" in problem:
        return f"the inputs are {first.dtype} where an embedding wants indices: pass x.long()"
    if not first.is_floating_point():
        return f"the inputs are {first.dtype} where a layer wants numbers of {dtype}: pass x.to({dtype})"
    return f"the inputs are {first.dtype} and the weights {dtype}: pass x.to({dtype}) or model.to({first.dtype})"


def select_output(value: Any, output: OutputSelector = None) -> Tensor:
    """The output tensor of a model that may return a tensor, a tuple, a dict or a Hugging Face ``ModelOutput``."""
    if callable(output):
        value = output(value)
    elif isinstance(output, str) and not isinstance(value, Mapping) and hasattr(value, output):
        value = getattr(value, output)  # a named tuple or a dataclass
    elif output is not None:
        try:
            value = value[output]
        except (KeyError, IndexError, TypeError) as error:
            keys = list(value.keys()) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise InputError(f"output={output!r} is not in what the model returned: {keys}") from error
    elif isinstance(value, Mapping):
        known = [key for key in _OUTPUT_KEYS if key in value]
        scores = [item for key, item in value.items() if key.endswith("_logits") and isinstance(item, Tensor)]
        if known:
            value = value[known[0]]
        elif scores and len({item.shape for item in scores}) == 1:
            value = torch.stack(scores, -1)  # start and end of an answer, at every position
        else:
            raise InputError(f"the model returned a mapping with keys {list(value.keys())}; name one with output=")
    if not isinstance(value, Tensor):
        raise InputError(
            f"the model returned a {type(value).__name__}, not a tensor; say which item with output= (an index, a name, or "
            "a function of what it returned)"
        )
    if not value.is_floating_point():
        raise InputError(f"the model's output has dtype {value.dtype}; a real floating-point output is needed")
    return value


def model_device(model: nn.Module) -> torch.device:
    """Device of the model's first parameter or buffer (CPU when it has none)."""
    root = unwrap(model)
    for tensor in (*root.parameters(), *root.buffers()):
        if not tensor.is_meta:
            return tensor.device
    hooks: list[Any] = [module._hf_hook for module in root.modules() if hasattr(module, "_hf_hook")]
    places = [getattr(hook, "execution_device", None) for hook in hooks]  # of offloaded models
    return torch.device(next((place for place in places if place is not None), "cpu"))


def model_dtype(model: nn.Module) -> torch.dtype | None:
    """Type of the model's first floating-point parameter or buffer (``None`` when it has none)."""
    return next((t.dtype for t in (*model.parameters(), *model.buffers()) if t.is_floating_point()), None)


@contextmanager
def evaluating(model: nn.Module, eval_mode: bool = True) -> Iterator[None]:
    """Run in eval mode (unless told otherwise), unseen by the user's captures and optimizers.

    Afterwards every module has its own mode again and the random generators their state.
    """
    device = model_device(model)
    cuda = [device] if device.type == "cuda" else []
    mode = in_eval_mode(model) if eval_mode else nullcontext()
    with unseen(model), torch.random.fork_rng(devices=cuda), mode, differentiable(model):
        yield
