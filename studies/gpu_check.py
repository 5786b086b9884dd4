"""What a GPU must show: cost of the default table, optimizers with and without CUDA graphs, and the numbers of the CPU.

    PYTHONPATH=src:. python studies/gpu_check.py [--layers 22] [--width 2048] [--device cuda] [--parts numbers,steps,cost]

Needs torch and numpy alone. The model has the shape of a Llama of 1.1 billion parameters, with random weights and tokens, in
float32. Every part prints its figures as it goes, so that a run that is cut short has shown something.
"""

from __future__ import annotations

import argparse
import copy
import cProfile
import pstats
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs

CROSS = nn.CrossEntropyLoss()


class Block(nn.Module):
    """Attention with rotary positions and grouped keys, and a gated MLP, as in Llama."""

    def __init__(self, width: int, hidden: int, heads: int, groups: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q_proj, self.o_proj = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, groups * self.size, bias=False)
        self.v_proj = nn.Linear(width, groups * self.size, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """The next hidden states ``[batch, tokens, width]``."""
        h = self.norm1(x)
        q, k, v = (f(h).unflatten(-1, (-1, self.size)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj))
        q, k = (
            t * rotation[0] + torch.cat([-t[..., self.size // 2 :], t[..., : self.size // 2]], -1) * rotation[1]
            for t in (q, k)
        )
        k, v = (t.repeat_interleave(self.heads // t.shape[1], 1) for t in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h))


class Llama(nn.Module):
    """Embedding, blocks, norm and head; returns scores ``[batch, tokens, words]``."""

    def __init__(self, layers: int, width: int, words: int, heads: int, groups: int) -> None:
        super().__init__()
        hidden, size = width * 11 // 4, width // heads
        self.embed_tokens = nn.Embedding(words, width)
        self.layers = nn.ModuleList([Block(width, hidden, heads, groups) for _ in range(layers)])
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, words, bias=False)
        self.register_buffer("frequencies", 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float32) / size))

    def forward(self, ids: Tensor) -> Tensor:
        """Scores of the next words."""
        angles = torch.arange(ids.shape[1], device=ids.device, dtype=torch.float32)[:, None] * self.frequencies
        angles, h = torch.cat([angles, angles], -1), self.embed_tokens(ids)
        for block in self.layers:
            h = block(h, (angles.cos(), angles.sin()))
        return self.lm_head(self.norm(h))  # type: ignore[no-any-return]


def made(given: argparse.Namespace) -> tuple[Llama, list[tuple[Tensor, Tensor]]]:
    """The model on its device, and batches of tokens with the next ones as targets."""
    torch.manual_seed(0)
    with torch.device(given.device):
        model = Llama(given.layers, given.width, given.words, given.heads, max(1, given.heads // 8)).eval()
        for p in model.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        ids = torch.randint(given.words, (4, 4, given.tokens + 1))
    return model, [(part[:, :-1], part[:, 1:]) for part in ids]


class Cost:
    """Seconds and peak memory of a block of code on the device."""

    def __init__(self, device: str) -> None:
        self._cuda = device.startswith("cuda")

    def __enter__(self) -> Cost:
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        self._start = time.perf_counter()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self._start
        self.gib = torch.cuda.max_memory_allocated() / 2**30 if self._cuda else 0.0


def cost(given: argparse.Namespace) -> None:
    """The default table against forward and backward passes over the same batches."""
    model, batches = made(given)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e9:.3f} billion parameters, 4 batches of 4×{given.tokens}")

    def passes() -> None:
        for x, y in batches:
            CROSS(model(x).flatten(0, 1), y.flatten()).backward()

    passes()
    with Cost(given.device) as plain:
        passes()
    model.zero_grad(set_to_none=True)
    print(f"forward and backward {plain.seconds:.2f} s, {plain.gib:.1f} GiB", flush=True)
    for memory in given.memory:
        profile, options = cProfile.Profile(), {"memory": memory} if memory else {}
        ended = ""
        signal.alarm(given.limit)
        try:
            with Cost(given.device) as ours, profile:
                table = gs.measure(model, batches, CROSS, progress=False, **options)
        except TimeoutError:
            ended = ", ended by --limit"
        signal.alarm(0)
        print(
            f"gs.measure, memory={memory or 'default'}{ended}: {ours.seconds:.2f} s, {ours.gib:.1f} GiB; ratio "
            f"{ours.seconds / plain.seconds:.2f} (goal ≤ 6), {ours.gib - plain.gib:+.1f} GiB (goal ≤ +8)",
            flush=True,
        )
        if ours.seconds > 6 * plain.seconds:
            pstats.Stats(profile).sort_stats("tottime").print_stats(14)
    if ended:
        return
    cells = [value for row in table.rows.values() for value in row.values()]
    print(f"{len(table.rows)} layers, {len(cells)} cells, {sum(value is None for value in cells)} without a value")


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "VCL": lambda model: gs.VCL(model, gamma=0.1),
    "FreeMuon": gs.FreeMuon,
    "GramWhitened": lambda model: gs.GramWhitened(torch.optim.SGD(model.parameters(), lr=0.01), model),
}


def steps(given: argparse.Namespace) -> None:
    """One step of each optimizer: eager, after a backward pass from a CUDA graph, and inside the graph."""
    small = argparse.Namespace(**{**vars(given), "layers": min(given.layers, 2), "width": min(given.width, 512)})
    model, batches = made(small)
    x, y = batches[0]

    def backward(net: nn.Module) -> None:
        CROSS(net(x).flatten(0, 1), y.flatten()).backward()

    for name, make in OPTIMIZERS.items():
        eager = copy.deepcopy(model)
        rule = make(eager)
        backward(eager)
        rule.step()  # allocates
        rule.zero_grad()
        backward(eager)
        with Cost(given.device) as one:
            rule.step()
        print(f"{name}: a step takes {1e3 * one.seconds:.1f} ms", flush=True)
        if given.device.startswith("cuda"):
            for inside in (False, True):
                label = "step inside the graph" if inside else "step after a replayed backward pass"
                try:
                    print(f"  {label}: {graphed(copy.deepcopy(model), eager, make, backward, inside)}", flush=True)
                except Exception as error:  # what a graph cannot record is a result
                    torch.cuda.synchronize()
                    print(f"  {label}: {type(error).__name__}: {str(error).splitlines()[0][:150]}", flush=True)


def graphed(net: nn.Module, eager: nn.Module, make: Any, backward: Callable[[nn.Module], None], inside: bool) -> str:
    """Two steps with CUDA graphs, compared with the two eager ones of ``eager``."""
    start = copy.deepcopy(net.state_dict())
    rule = make(net)
    first = copy.deepcopy(rule.state_dict())

    def step() -> None:
        rule.zero_grad(set_to_none=False)
        backward(net)
        if inside:
            rule.step()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    net.load_state_dict(start)
    rule.load_state_dict(first)
    for _ in range(2):
        graph.replay()
        if not inside:
            rule.step()
    torch.cuda.synchronize()
    moved = sum((p - start[n]).norm() ** 2 for n, p in eager.named_parameters()) ** 0.5
    off = sum((p - q).norm() ** 2 for p, q in zip(net.parameters(), eager.parameters(), strict=True)) ** 0.5
    return f"weights differ from eager steps by {float(off / moved):.1e} of the way they went"


class Attention(nn.Module):
    """Words, attention, an LSTM and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.mixed = nn.Embedding(9, 8), nn.MultiheadAttention(8, 2, batch_first=True)
        self.cell, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of three classes."""
        h = self.words(x)
        return self.head(self.cell(self.mixed(h, h, h)[0])[0][:, -1])  # type: ignore[no-any-return]


def nets() -> dict[str, tuple[nn.Module, Tensor, dict[str, Any]]]:
    """Small nets with inputs, and options of their tables."""
    x, ids = torch.randn(40, 12), torch.randint(9, (40, 5))
    perceptron = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 3))
    images = nn.Sequential(
        nn.Conv2d(3, 6, 2),
        nn.ReLU(),
        nn.Conv2d(6, 4, 2, groups=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    return {
        "perceptron": (perceptron, x, {}),
        "perceptron, estimated": (copy.deepcopy(perceptron), x, {"memory": 4096}),
        "images": (images, x.reshape(40, 3, 2, 2), {}),
        "sequences": (Attention(), ids, {}),
    }


def same(found: Any, expected: Any) -> bool:
    """Whether two cells of a table agree up to rounding."""
    if found is None or expected is None or expected != expected:
        return found is expected or (expected != expected and found != found)
    return abs(found - expected) <= 1e-6 * abs(expected) + 1e-8


def numbers(given: argparse.Namespace) -> None:
    """All columns of small nets, and weights after three steps, in float64, on the device and on the CPU."""
    torch.manual_seed(0)
    y, agree, problems = torch.arange(40) % 3, 0, []
    for name, (model, x, options) in nets().items():
        model.double()
        x = x.double() if x.is_floating_point() else x
        reference = copy.deepcopy(model)
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.1)
        expected = gs.measure(model, (x, y), CROSS, measures="all", reference=reference, **options)
        model, reference = (net.to(given.device) for net in (model, reference))
        for default in (None, given.device):
            torch.set_default_device(default)
            try:
                found = gs.measure(model, (x, y), CROSS, measures="all", reference=reference, **options)
            except Exception:
                problems.append(f"{name}, default device {default}: {traceback.format_exc(limit=-2)}")
                continue
            finally:
                torch.set_default_device(None)
            for layer, row in expected.rows.items():
                wrong = [c for c, value in row.items() if not same(found[layer][c], value)]
                agree += len(row) - len(wrong)
                problems += [f"{name}: {layer}.{c} {row[c]} on the CPU, {found[layer][c]} here" for c in wrong]
    start, x, _ = nets()["perceptron"]
    for name, make in OPTIMIZERS.items():
        here, there = (trained(copy.deepcopy(start).double(), x.double(), y, make, d) for d in ("cpu", given.device))
        wrong = [
            str(i) for i, pair in enumerate(zip(here, there, strict=True)) if not torch.allclose(*pair, 1e-5, 1e-7)
        ]
        agree += len(here) - len(wrong)
        problems += [f"{name}: parameters {', '.join(wrong)} after three steps"] if wrong else []
    print(f"{agree} numbers agree with the CPU, {len(problems)} do not")
    print("\n".join(problems[:20]))


def trained(model: nn.Module, x: Tensor, y: Tensor, make: Any, device: str) -> list[Tensor]:
    """Parameters after three steps on a device."""
    model, x, y = model.to(device), x.to(device), y.to(device)
    rule = make(model)
    for _ in range(3):
        rule.zero_grad()
        CROSS(model(x), y).backward()
        rule.step()
    return [p.detach().cpu() for p in model.parameters()]


def give_up(*given: object) -> None:
    """End a table that takes too long."""
    raise TimeoutError("--limit")


PARTS = {"numbers": numbers, "steps": steps, "cost": cost}


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"layers": 22, "width": 2048, "words": 32000, "heads": 32, "tokens": 128}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, default=45, help="seconds after which a table is given up")
    parser.add_argument("--memory", type=int, nargs="+", default=[0, 2**24], help="budgets of tables; 0 is the default")
    parser.add_argument("--parts", default=",".join(PARTS))
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, give_up)
    where = torch.cuda.get_device_name() if given.device.startswith("cuda") else "the CPU"
    print(f"torch {torch.__version__} on {where}", flush=True)
    for part in given.parts.split(","):
        start = time.perf_counter()
        try:
            PARTS[part](given)
        except Exception:
            traceback.print_exc()
        print(f"-- {part}: {time.perf_counter() - start:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
