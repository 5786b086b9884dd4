"""Models of transformers, batches as a loader yields them: every value against one sequence at a time, without padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gramscope as gs
from reference import target_linearity

transformers = pytest.importorskip("transformers")

WORDS, PAD, RIDGE = 11, 0, 0.5
MEASURES = [
    "gradient_norm",
    "vcs_residual",
    "nfa",
    "agop_trace",
    "target_linearity",
    "surrogate",
    "feature_rank",
    "nc1",
]
BERT = {
    "vocab_size": WORDS, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 6,
    "max_position_embeddings": 12, "hidden_dropout_prob": 0.3,
}  # fmt: skip
LLAMA = {
    "vocab_size": WORDS, "hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
Batch = dict[str, Tensor]


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    t = transformers
    makers: dict[str, Callable[[], nn.Module]] = {
        "gpt2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(
                vocab_size=WORDS, n_positions=12, n_embd=8, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2
            )
        ),
        "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)),
        "mixtral": lambda: t.MixtralForCausalLM(
            t.MixtralConfig(**LLAMA, num_local_experts=3, experts_implementation="eager")
        ),
        "classifier": lambda: t.BertForSequenceClassification(t.BertConfig(**BERT, num_labels=3)),
        "tagger": lambda: t.BertForTokenClassification(t.BertConfig(**BERT, num_labels=3)),
        "masked": lambda: t.BertForMaskedLM(t.BertConfig(**BERT)),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(
                vocab_size=WORDS, d_model=8, d_kv=4, d_ff=6, num_layers=1, num_heads=2, decoder_start_token_id=0,
                bos_token_id=1,
            )
        ),
        "vit": lambda: t.ViTForImageClassification(
            t.ViTConfig(
                hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6, image_size=4, patch_size=2,
                num_labels=3,
            )
        ),
    }  # fmt: skip
    model = makers[name]().double()
    with torch.no_grad():
        for (
            p
        ) in model.parameters():  # away from the initialisation, where attention is uniform and many numbers are tiny
            p.add_(0.3 * torch.randn_like(p))
    return model


def sentences(count: int = 14) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, WORDS, (2 + i % 4,), generator=generator) for i in range(count)]


def padded(rows: list[Tensor], side: str, more: int = 0, fill: int = PAD) -> Tensor:
    length = max(map(len, rows)) + more
    return torch.stack(
        [F.pad(r, (length - len(r), 0) if side == "left" else (0, length - len(r)), value=fill) for r in rows]
    )


def batched(rows: list[Tensor], labels: list[Tensor] | Tensor, side: str, positions: bool) -> list[Batch]:
    """Two batches of different lengths, with two pads more than the second one needs."""
    result = []
    for part, more in ((slice(0, 6), 0), (slice(6, None), 2)):
        ids, mask = padded(rows[part], side, more), padded([torch.ones_like(r) for r in rows[part]], side, more)
        y = labels[part] if isinstance(labels, Tensor) else padded(labels[part], side, more, fill=-100)
        batch = {"input_ids": ids, "attention_mask": mask, "labels": y}
        if positions and side == "left":
            batch["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        result.append(batch)
    return result


class Oracle:
    """Sums over single sequences without padding, by plain autograd; ``pairs`` are ``(position, label)``, −1 for a whole.

    The outputs of the layers get a zero tensor added, whose gradient is that of the pre-activation.
    """

    def __init__(self, model: nn.Module, samples: list[Batch], pairs: list[list[tuple[int, int]]]) -> None:
        model = model.eval()
        self.n, self.terms, self.loss, self.correct = len(samples), sum(map(len, pairs)), 0.0, 0
        kinds = (nn.Linear, nn.Conv2d, transformers.pytorch_utils.Conv1D)
        self.modules = {name: m for name, m in model.named_modules() if isinstance(m, kinds)}
        self.D = {name: torch.zeros(()) for name in self.modules}
        self.Sigma, self.JtJ = dict(self.D), dict(self.D)
        self.rows: dict[str, list[Tensor]] = {name: [] for name in self.modules}
        self.labels = torch.tensor([label for sample in pairs for _, label in sample])
        for sample, labelled in zip(samples, pairs, strict=True):
            self._add(model, sample, labelled)

    def _add(self, model: nn.Module, sample: Batch, labelled: list[tuple[int, int]]) -> None:
        inputs: dict[str, Tensor] = {}
        zeros: dict[str, Tensor] = {}

        def hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor]:
            def add_zero(_: nn.Module, args: tuple[Tensor, ...], z: Tensor) -> Tensor:
                inputs[name], zeros[name] = args[0].detach(), torch.zeros_like(z, requires_grad=True)
                return z + zeros[name]

            return add_zero

        handles = [m.register_forward_hook(hook(name)) for name, m in self.modules.items()]
        logits = model(**sample).logits[0]
        for handle in handles:
            handle.remove()
        loss = torch.zeros(())
        for position, label in labelled:
            scores = logits if position == -1 else logits[position]
            loss = loss - scores.log_softmax(0)[label]
            self.correct += int(scores.argmax() == label)
        self.loss += float(loss.detach())
        deltas = torch.autograd.grad(loss, list(zeros.values()), retain_graph=True, allow_unused=True)
        jacobians = [
            torch.autograd.grad(f, list(zeros.values()), retain_graph=True, allow_unused=True) for f in logits.flatten()
        ]
        for index, name in enumerate(zeros):
            h = self._sites(name, inputs[name])
            self.D[name] = self.D[name] + (0 if deltas[index] is None else self._flat(name, deltas[index]).T @ h)
            delta = torch.zeros(()) if deltas[index] is None else self._flat(name, deltas[index])
            self.Sigma[name] = self.Sigma[name] + (delta.T @ delta if delta.dim() else 0)
            for row in jacobians:
                if row[index] is not None:
                    j = self._flat(name, row[index])
                    self.JtJ[name] = self.JtJ[name] + j.T @ j
            whole = labelled[0][0] == -1
            self.rows[name] += [h.mean(0)] if whole else [h[p] for p, _ in labelled if len(h) == len(logits)]

    def _sites(self, name: str, x: Tensor) -> Tensor:
        module = self.modules[name]
        if isinstance(module, nn.Conv2d):
            return F.unfold(x, module.kernel_size, stride=module.stride)[0].T
        return x.reshape(-1, x.shape[-1])

    def _flat(self, name: str, z: Tensor) -> Tensor:
        return z[0].flatten(1).T if isinstance(self.modules[name], nn.Conv2d) else z.reshape(-1, z.shape[-1])

    def weight(self, name: str) -> Tensor:
        module = self.modules[name]
        W = module.weight.detach()
        return W.T if type(module).__name__ == "Conv1D" else W.flatten(1)

    def measures(self, name: str, gamma: float) -> dict[str, float]:
        W, D, K = self.weight(name), self.D[name], self.JtJ[name] / self.n
        G, step = W.T @ K @ W, gamma / self.terms
        actual = (W - step * D).T @ (W - step * D) - W.T @ W
        found = {
            "gradient_norm": D.norm() / self.terms,
            "vcs_residual": step**2 * (D.T @ D - W.T @ self.Sigma[name] @ W).norm() / actual.norm(),
            "nfa": (W.T @ W * G).sum() / (W.T @ W).norm() / G.norm(),
            "agop_trace": torch.trace(G),
        }
        if len(self.rows[name]) == len(self.labels):
            H, Y = torch.stack(self.rows[name]), F.one_hot(self.labels).double()
            Y = Y[:, Y.any(0)] - Y[:, Y.any(0)].mean(0)
            s = torch.linalg.svdvals(H - H.mean(0))
            p = s[s > 1e-10 * s[0]] / s.sum()
            found |= {
                "target_linearity": target_linearity(H, Y, RIDGE, False),
                "surrogate": (H.T @ Y).square().sum(),
                "feature_rank": torch.exp(-(p * p.log()).sum()),
                "nc1": torch.tensor(gs.neural_collapse(H, self.labels).nc1),
            }
        return {key: float(value) for key, value in found.items()}


def check(table: Any, oracle: Oracle, layers: int, rel: float = 1e-8) -> None:
    assert table.network["loss"] == pytest.approx(oracle.loss / oracle.terms, rel=rel)
    assert table.network["accuracy"] == pytest.approx(oracle.correct / oracle.terms)
    compared = 0
    for name in set(table) & set(oracle.modules):
        for measure, expected in oracle.measures(name, 0.05).items():
            assert table[name][measure] == pytest.approx(expected, rel=100 * rel, abs=1e-12), (name, measure)
            compared += measure == "surrogate"
    assert compared >= layers


def measured(model: nn.Module, data: Any, loss: Any = None, **options: Any) -> Any:
    return gs.measure(model, data, loss, measures=MEASURES, ridge=RIDGE, **options)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_causal_language_models(name: str, side: str) -> None:
    model, rows = made(name), sentences()
    pairs = [list(enumerate(r[1:].tolist())) for r in rows]
    oracle = Oracle(model, [{"input_ids": r[None]} for r in rows], pairs)
    data = batched(rows, rows, side, positions=name == "gpt2")
    table = measured(model, data)
    check(table, oracle, layers=5, rel=1e-6)  # the models' own loss is in float32
    assert "next-token labels: the output at position t is compared with the label at t + 1" in str(table)
    assert "the loss is the one that the model itself returns" in table.notes["(loss)"].text
    assert "means over all positions (tokens, pixels) that count" in table.notes["(positions)"].text
    assert table.network["positions"] == oracle.terms
    check(measured(model, data, nn.CrossEntropyLoss()), oracle, layers=5)
    unmasked = [batch | {"labels": batch["input_ids"]} for batch in data]  # labels at padding
    check(measured(model, unmasked), oracle, layers=5, rel=1e-6)


def test_other_terms_of_a_models_own_loss() -> None:
    """A router's balance is a part of the model's loss and of its gradient; the labels are shifted all the same."""
    model, rows = made("mixtral"), sentences()
    model.config.output_router_logits = True
    batch = batched(rows, rows, "right", positions=False)[0]
    table = measured(model, batch)
    loss = model.eval()(**batch, output_router_logits=True).loss
    (gradient,) = torch.autograd.grad(loss, model.model.layers[0].self_attn.o_proj.weight)
    assert table.network["loss"] == pytest.approx(float(loss.detach()))
    assert table["model.layers.0.self_attn.o_proj"]["gradient_norm"] == pytest.approx(float(gradient.norm()), rel=1e-5)
    assert "(targets)" in table.notes


@pytest.mark.parametrize("side", ["right", "left"])
def test_encoders(side: str) -> None:
    rows, generator = sentences(), torch.Generator().manual_seed(2)
    model, classes = made("classifier"), torch.randint(3, (14,), generator=generator)
    oracle = Oracle(model, [{"input_ids": r[None]} for r in rows], [[(-1, int(c))] for c in classes])
    data = batched(rows, classes, side, positions=True)
    if side == "right":  # it reads its class at the first position, which must not be a pad
        check(measured(model, data), oracle, layers=8)
        check(measured(model, data, nn.CrossEntropyLoss()), oracle, layers=8)

    for name, count in (("tagger", 3), ("masked", WORDS)):
        model = made(name)
        labels = [torch.randint(count, r.shape, generator=generator) for r in rows]
        for i, label in enumerate(labels):
            label[i % len(label)] = -100
        pairs = [[(t, int(c)) for t, c in enumerate(label) if c >= 0] for label in labels]
        oracle = Oracle(model, [{"input_ids": r[None]} for r in rows], pairs)
        table = measured(model, batched(rows, labels, side, positions=True))
        check(table, oracle, layers=7)
        assert "(targets)" not in table.notes  # not shifted


@pytest.mark.parametrize("lengths", ["equal", "different"])
def test_sequence_to_sequence(lengths: str) -> None:
    """Labels feed the decoder; layers of the encoder have gradients and Jacobians but no labels."""
    model, rows = made("t5"), sentences()
    answers = [r.flip(0) for r in rows] if lengths == "equal" else [r[:-1] for r in rows]
    samples = [{"input_ids": r[None], "labels": a[None]} for r, a in zip(rows, answers, strict=True)]
    oracle = Oracle(model, samples, [list(enumerate(a.tolist())) for a in answers])
    data = [
        {"input_ids": padded(r, "right"), "attention_mask": padded([torch.ones_like(s) for s in r], "right"),
         "labels": padded(a, "right", fill=-100)}
        for r, a in ((rows[:6], answers[:6]), (rows[6:], answers[6:]))
    ]  # fmt: skip
    for name in oracle.modules:  # keys and values of the cross-attention and the encoder see the source
        if name.startswith("encoder") or name.endswith(("EncDecAttention.k", "EncDecAttention.v")):
            oracle.rows[name].clear()
    table = measured(model, data)
    check(table, oracle, layers=9)
    assert table["encoder.block.0.layer.0.SelfAttention.q"]["agop_trace"] > 0
    assert table["encoder.block.0.layer.0.SelfAttention.q"]["target_linearity"] is None
    check(measured(model, data, nn.CrossEntropyLoss()), oracle, layers=9)


def test_vision() -> None:
    model, generator = made("vit"), torch.Generator().manual_seed(3)
    x = torch.randn(14, 3, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (14,), generator=generator)
    oracle = Oracle(model, [{"pixel_values": i[None]} for i in x], [[(-1, int(c))] for c in y])
    check(measured(model, {"pixel_values": x, "labels": y}), oracle, layers=8)
    loader = torch.utils.data.DataLoader([{"pixel_values": i, "labels": c} for i, c in zip(x, y, strict=True)], 5)
    check(measured(model, loader, nn.CrossEntropyLoss()), oracle, layers=8)


def test_kernels_take_what_measure_takes_and_do_not_see_padding() -> None:
    model, rows = made("llama"), sentences()[:5]
    oracle = Oracle(model, [{"input_ids": r[None]} for r in rows], [[(0, 3)] for _ in rows])
    name = "model.layers.0.mlp.up_proj"
    W = oracle.weight(name)
    ones = [torch.ones_like(r) for r in rows]
    duals = []
    for side, more in (("right", 0), ("left", 0), ("right", 3), ("left", 3)):
        batch = {"input_ids": padded(rows, side, more), "attention_mask": padded(ones, side, more)}
        K = gs.tangent_kernel(model, batch)[name]
        torch.testing.assert_close(K, oracle.JtJ[name] / 5)
        torch.testing.assert_close(gs.agop(model, [batch | {"labels": batch["input_ids"]}])[name], W.T @ K @ W)
        split = [({key: part[i : i + 2] for key, part in batch.items()},) for i in (0, 2, 4)]
        torch.testing.assert_close(gs.agop(model, split, unpack=lambda b: (b[0], None))[name], W.T @ K @ W)
        sketched = gs.agop(model, batch, sketch=4, generator=torch.Generator().manual_seed(0))[name]
        duals.append((gs.dual_tangent_kernel(model, batch)[name], sketched))
        apart = gs.dual_tangent_kernel(model, split, unpack=lambda b: (b[0], None))[name]
        torch.testing.assert_close(apart, duals[0][0])
    assert torch.trace(duals[0][0]) == pytest.approx(float(torch.trace(oracle.JtJ[name])))
    for dual, sketched in duals[1:]:
        torch.testing.assert_close(dual, duals[0][0])
        torch.testing.assert_close(sketched, duals[0][1])


def test_tokens_of_padded_sequences() -> None:
    """A position counts tokens, not pads; the mean is over tokens."""
    model, rows = made("classifier"), sentences()
    classes = torch.arange(14) % 3
    layer = "bert.encoder.layer.0.attention.self.query"
    found = []
    for side in ("right", "left"):
        data = batched(rows, classes, side, positions=True)
        found.append([gs.collect(model, data, tokens=t)[layer].features.joint for t in ("mean", 0, -1, "each")])
    for right, left in zip(*found, strict=True):
        assert right.n == left.n
        torch.testing.assert_close(right.C_hh, left.C_hh)
    assert [moments.n for moments in found[0]] == [14, 14, 14, sum(map(len, rows))]
    with gs.capture(model.eval(), layer, gradients=False) as tape:
        last = []
        for row in rows:
            model(row[None])
            last.append(tape[layer].h[0, -1])
            tape.clear()
    torch.testing.assert_close(found[0][2].mean_h, torch.stack(last).mean(0))
    assert "position_ids" in str(
        gs.measure(model, batched(rows, classes, "left", positions=False), measures="weight_norm")
    )


def test_labels_that_are_stated_are_taken_as_they_are() -> None:
    """A pair (x, y), unpack= and a function of one's own state their labels; only those of a mapping are the model's."""
    model, rows = made("gpt2"), sentences()
    data = batched(rows, rows, "right", positions=False)
    expected = measured(model, data)

    def shifted(batch: Batch) -> tuple[Batch, Tensor]:
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        return inputs, F.pad(batch["labels"][:, 1:], (0, 1), value=-100)

    def next_token(output: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(output[:, :-1].mT, labels[:, 1:], reduction="sum")

    def of_batch(returned: Any, batch: Batch) -> Tensor:
        return next_token(returned.logits, batch["labels"])

    own = measured(model, data, nn.CrossEntropyLoss(), unpack=shifted)
    assert "(targets)" not in own.notes
    for name in expected:
        assert own[name] == pytest.approx(expected[name]), name
    for loss in (next_token, of_batch):  # summed by themselves: the mean is over the sequences
        table = measured(model, data, loss, reduction="sum")
        ratio = expected.network["positions"] / 14
        assert table.network["loss"] == pytest.approx(expected.network["loss"] * ratio)
        assert table["lm_head"]["gradient_norm"] == pytest.approx(expected["lm_head"]["gradient_norm"] * ratio)
        assert table["lm_head"]["target_linearity"] == pytest.approx(expected["lm_head"]["target_linearity"])


def test_monitor_reference_and_the_second_pass() -> None:
    model, rows = made("gpt2"), sentences()
    data = batched(rows, rows, "right", positions=False)
    monitor = gs.Monitor(model, data, measures=[*MEASURES, "nc4"], ridge=RIDGE, samples=14)
    expected = gs.measure(model, data, measures=[*MEASURES, "nc4"], ridge=RIDGE)
    for name, row in monitor.records[0]["layers"].items():
        assert row == pytest.approx(expected[name]), name
    H = torch.stack(
        Oracle(model, [{"input_ids": r[None]} for r in rows], [[(t, 3) for t in range(len(r) - 1)] for r in rows]).rows[
            "lm_head"
        ]
    )
    labels = torch.cat([r[1:] for r in rows])
    assert expected["lm_head"]["nc4"] == pytest.approx(gs.neural_collapse(H, labels, model.lm_head).nc4)


def test_labels_that_the_model_cannot_use() -> None:
    """A target under the name of the model's own labels, of another task: the model is called without it."""
    model, rows = made("gpt2"), sentences()
    y = torch.randn(14, 2, dtype=torch.float64)
    data = batched(rows, y, "right", positions=False)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return (output[:, 0, :2] - target).square().sum(1)

    stated = [({key: b[key] for key in ("input_ids", "attention_mask")}, b["labels"]) for b in data]
    expected, found = measured(model, stated, loss), measured(model, data, loss)
    for name in expected:
        assert found[name] == pytest.approx(expected[name], nan_ok=True)
