"""Which axis of a tensor holds the samples, and which one of a module's output the features."""

from __future__ import annotations

from dataclasses import dataclass

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
    """``"first"`` or ``"last"`` where the module's type tells; else ``"usual"``, or ``"unknown"`` near 1-d convolutions.

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


def output_rows(value: Tensor, layout: str, name: str, batch_dim: int = 0) -> Tensor:
    """A module's output as ``[batch, sites, features]``; usual are ``[batch, sites, features]`` and ``[batch, c, h, w]``.

    ``batch_dim`` is the axis of the batch where features are last; images have it first.
    """
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
    return value.movedim(batch_dim, 0).flatten(1, -2)


@dataclass(frozen=True)
class SampleAxes:
    """Where the samples are in tensors of three and more axes.

    Args:
        batch_dim: the axis that the caller gave.
        known: axes inside torch's own sequence modules, from their ``batch_first``.
    """

    batch_dim: int
    known: dict[nn.Module, int]

    def of(self, module: nn.Module) -> int:
        """The axis of the samples in the module's inputs and outputs."""
        return self.known.get(module, self.batch_dim)

    def is_doubtful(self, module: nn.Module, value: Tensor) -> bool:
        """Whether either of the first two axes may hold the samples: equally long, in a model with sequence-first modules."""
        if module in self.known or self.batch_dim != 0 or 1 not in self.known.values():
            return False
        return value.dim() > 2 and value.shape[0] == value.shape[1]


def sample_axes(model: nn.Module, batch_dim: int) -> SampleAxes:
    """The axes of a model, from ``batch_dim`` and from torch's own sequence modules inside it.

    >>> encoder = nn.TransformerEncoderLayer(4, 2, 8)
    >>> sample_axes(nn.Sequential(nn.Linear(4, 4), encoder), 0).of(encoder.linear1)
    1
    """
    known: dict[nn.Module, int] = {}
    for module in model.modules():  # from the outside in
        first = _batch_first(module)
        if first is not None:
            known |= dict.fromkeys(module.modules(), 0 if first else 1)
    return SampleAxes(batch_dim, known)


def _batch_first(module: nn.Module) -> bool | None:
    """Whether a sequence module of torch has its samples first; ``None`` for other modules."""
    if isinstance(module, nn.TransformerEncoder | nn.TransformerDecoder) and len(module.layers):
        module = module.layers[0]
    if isinstance(module, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        module = module.self_attn
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention | nn.Transformer):
        return bool(module.batch_first)
    return None
