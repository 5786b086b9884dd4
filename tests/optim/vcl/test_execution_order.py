"""Which layer is executed last: hooks that run, hooks that torch.compile traces, and their removal."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import gramscope as gs
from gramscope.errors import LayerError
from optim.nets import HeadFirst, data, mlp, same, train

pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.:DeprecationWarning"),  # the compiler's own
]


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Blocks(nn.Module):
    """Equal blocks; the head is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


class Sequences(nn.Module):
    """Weights that no module hook sees one by one; the last state of the GRU is used, and the head is registered first."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.recurrent = nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.attention(x, x, x)[0]
        return self.head(self.recurrent(h)[1][-1])  # type: ignore[no-any-return]


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def head(optimizer: gs.VCL) -> Any:
    return optimizer.param_groups[0]["head"]


def whole(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="aot_eager", fullgraph=True)
    return model


def block_by_block(model: Blocks) -> Blocks:
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


@pytest.mark.parametrize("make", [HeadFirst, Blocks])
@pytest.mark.parametrize("compiled", [whole, in_place, block_by_block])
def test_a_compiled_model_gets_the_head_of_the_eager_one(
    make: Callable[[], Any], compiled: Callable[[Any], Any]
) -> None:
    if make is HeadFirst and compiled is block_by_block:
        pytest.skip("has no blocks")
    eager = make()
    twin = copy.deepcopy(eager)
    x, y = data(7 if make is HeadFirst else 8, dtype=torch.float32)
    optimizer, other = gs.VCL(eager), gs.VCL(twin)
    train(eager, optimizer, x, y, 3)
    train(compiled(twin), other, x, y, 3)
    assert head(other) == head(optimizer) == "head"
    same(eager, twin, atol=1e-5, rtol=0)
    assert sum(counters["graph_break"].values()) == 0
    # a block has one graph for inputs with and one for inputs without gradients, with hooks as without
    assert counters["stats"]["unique_graphs"] == (2 if compiled is block_by_block else 1)


def test_layers_that_compiled_code_hides_leave_the_one_registered_last() -> None:
    """A compiled nn.Sequential of equal layers is one graph for all of them."""
    model = in_place(mlp(8, 8, 8, 8, dtype=torch.float32))
    optimizer = gs.VCL(model)
    train(model, optimizer, *data(8, dtype=torch.float32), 2)
    assert head(optimizer) == "4"


def test_passes_without_gradients_and_parts_called_alone_do_not_count() -> None:
    model = HeadFirst().double()
    optimizer = gs.VCL(model)
    x, y = data()
    with torch.no_grad():
        model.head(model.body(x))
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    (loss + model.body(x).sum()).backward()  # after the model returned
    optimizer.step()
    assert head(optimizer) == "head"


def test_attention_and_recurrent_layers() -> None:
    model = Sequences()
    x, y = torch.randn(10, 4, 8, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 3
    optimizer = gs.VCL(model)
    train(model, optimizer, x, y)
    assert head(optimizer) == "head"
    assert {"attention.q_proj", "attention.out_proj"} <= set(optimizer.diagnostics())


def test_no_hook_is_left_after_the_first_step_of_an_eager_model() -> None:
    model = mlp(7, 6, 5, 3)
    optimizer = gs.VCL(model)
    assert hooks(model) > 0
    copied = copy.deepcopy(model)
    train(model, optimizer, *data())
    assert hooks(model) == 0
    train(copied, torch.optim.SGD(copied.parameters(), lr=0.1), *data())  # the hooks of a copy do nothing


def test_hooks_of_copies_and_saved_models_do_not_break_graphs() -> None:
    model = mlp(7, 6, 5, 3, dtype=torch.float32)
    optimizers = gs.VCL(model), gs.VCL(model, gamma=0.1, solver="recursive")
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for copied in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        whole(copied)(data(dtype=torch.float32)[0]).sum().backward()
    for optimizer in optimizers:
        optimizer.close()
    assert hooks(model) == 0


def test_a_model_that_ran_compiled_before_names_the_way_out() -> None:
    model = mlp(7, 6, 5, 3, dtype=torch.float32)
    x, y = data(dtype=torch.float32)
    compiled = torch.compile(model, backend="eager")
    compiled(x).sum().backward()
    optimizer = gs.VCL(compiled)
    optimizer.close()  # torch may compile anew with hooks; without any the order cannot be seen
    with pytest.raises(LayerError, match=r"torch\.compile"):
        train(compiled, optimizer, x, y)
    train(compiled, gs.VCL(compiled, layers=["0", "2"]), x, y)
