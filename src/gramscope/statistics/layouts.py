"""Which axis of a module's output holds the features: the last one (sequences) or the one after the batch (images)."""

from __future__ import annotations

from torch import Tensor, nn

from gramscope.errors import InputError

_FIRST = (nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.GroupNorm)
_LAST = (
    nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Embedding, nn.RNNBase, nn.MultiheadAttention, nn.TransformerEncoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoder, nn.TransformerDecoderLayer,
)  # fmt: skip
_FIRST_MODULES = ("torch.nn.modules.pooling", "torch.nn.modules.upsampling", "torch.nn.modules.padding")
_ELEMENTWISE = ("torch.nn.modules.activation", "torch.nn.modules.dropout")
#: where these are used, three axes may be [batch, channels, length]
_ONE_DIMENSIONAL = (nn.Conv1d, nn.ConvTranspose1d)


def check_channels(channels: str) -> str:
    """The argument, or an error unless it is ``"auto"``, ``"first"`` or ``"last"``."""
    if channels not in ("auto", "first", "last"):
        raise InputError(f"channels={channels!r}: give 'auto', 'first' or 'last'")
    return channels


def layout(module: nn.Module, model: nn.Module) -> str:
    """``"first"`` or ``"last"`` where the module's type tells; ``"usual"`` or, with 1-d convolutions about, ``"unknown"``.

    >>> layout(nn.Sequential(nn.Conv1d(2, 3, 1), nn.ReLU()), nn.Identity()), layout(nn.ReLU(), nn.Linear(2, 2))
    ('first', 'usual')
    """
    if isinstance(module, nn.Sequential):
        for child in reversed(module):
            if type(child).__module__ not in _ELEMENTWISE or isinstance(child, _LAST):
                return layout(child, model)
    if isinstance(module, _FIRST) or type(module).__module__ in _FIRST_MODULES:
        return "first"
    if isinstance(module, _LAST):
        return "last"
    around = module if any(True for _ in module.children()) else model
    return "unknown" if any(isinstance(m, _ONE_DIMENSIONAL) for m in around.modules()) else "usual"


def output_rows(value: Tensor, layout: str, name: str) -> Tensor:
    """A module's output as ``[batch, sites, features]``; usual are ``[batch, sites, features]`` and ``[batch, c, h, w]``."""
    if value.dim() == 1:
        return value.reshape(-1, 1, 1)
    if value.dim() == 2:
        return value.unsqueeze(1)
    if layout == "unknown" and value.dim() == 3:
        raise InputError(
            f"the output of module {name!r} has shape {tuple(value.shape)}, in a network with 1-d convolutions: say whether "
            "its features are the axis after the batch (channels='first') or the last one (channels='last')"
        )
    if layout == "first" or (layout != "last" and value.dim() > 3):
        return value.flatten(2).mT
    return value.flatten(1, -2)
