from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from gramscope.layers.select import select_layers
from gramscope_lab.nets import CNN, MLP, MODELS, VAE, ResNet, Transformer, build, vae_loss
from gramscope_lab.nets.seeded_layers import ACTIVATIONS
from refusals import assert_refused

IMAGES = (3, 8, 8)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("name", MODELS)
def test_same_seed_same_weights_and_the_global_generator_is_untouched(name: str) -> None:
    before = torch.get_rng_state()
    first = build(name, IMAGES, 5, generator=seeded(3)).state_dict()
    again = build(name, IMAGES, 5, generator=seeded(3)).state_dict()
    other = build(name, IMAGES, 5, generator=seeded(4)).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)
    assert all(torch.isfinite(value.float()).all() for value in first.values())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vae"])
def test_output_shape_gradients_and_layers(name: str) -> None:
    model = build(name, IMAGES, 5)
    output = model(torch.rand(4, *IMAGES, generator=seeded(0)))
    assert output.shape == (4, 5)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert "readout" in select_layers(model).names


@given(
    hidden=st.lists(st.integers(1, 6), max_size=4),
    activation=st.sampled_from(sorted(ACTIVATIONS)),
    bias=st.booleans(),
    parametrisation=st.sampled_from(["standard", "ntk"]),
)
def test_mlp_is_the_textbook_formula(hidden: list[int], activation: str, bias: bool, parametrisation: str) -> None:
    model = MLP((2, 3), 4, hidden, activation=activation, bias=bias, parametrisation=parametrisation)  # type: ignore[arg-type]
    x = torch.randn(5, 2, 3, generator=seeded(1))
    phi = ACTIVATIONS[activation]()
    h = x.reshape(5, 6)
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(linears) == len(hidden) + 1
    for index, layer in enumerate(linears):
        factor = 1 / math.sqrt(layer.in_features) if parametrisation == "ntk" else 1.0
        z = factor * h @ layer.weight.T + (layer.bias if bias else 0.0)
        h = z if index == len(hidden) else phi(z)
    torch.testing.assert_close(model(x), h)


def test_activations_by_value() -> None:
    z = torch.linspace(-2, 2, 9, dtype=torch.float64)
    assert torch.equal(ACTIVATIONS["quadratic"]()(z), z**2 / 2)
    assert torch.equal(ACTIVATIONS["erf"]()(z), torch.erf(z))
    assert torch.equal(ACTIVATIONS["linear"]()(z), z)


def test_initial_variances() -> None:
    def variances(**options: object) -> list[float]:
        model = build("mlp", 300, 200, hidden=(400,), generator=seeded(0), **options)
        return [float(p.detach().var()) for name, p in model.named_parameters() if name.endswith("weight")]

    assert variances(init="normal", init_scale=[0.01, 2.0]) == pytest.approx([0.01 / 300, 2 / 400], rel=0.02)
    assert variances() == pytest.approx([1 / 900, 1 / 1200], rel=0.02)
    assert variances(init_scale=4.0) == pytest.approx([4 / 900, 4 / 1200], rel=0.02)
    assert variances(parametrisation="ntk", init_scale=[0.5, 1.0]) == pytest.approx([0.5, 1.0], rel=0.02)


def test_torch_init_has_the_bounds_of_torch() -> None:
    bound = 1 / math.sqrt(50)
    for parameter in MLP(50, 40, (30,)).hidden1.parameters():
        assert bound * 0.8 < float(parameter.detach().abs().max()) <= bound


def test_mlp_bias_per_layer_and_output_scale() -> None:
    model = MLP(4, 2, (3, 3), bias=(False, True, False), output_scale=0.5)
    assert [m.bias is not None for m in model if isinstance(m, nn.Linear)] == [False, True, False]
    x = torch.randn(6, 4, generator=seeded(0))
    torch.testing.assert_close(model(x), 0.5 * nn.Sequential(*list(model)[:-1])(x))
    assert [type(module) for module in MLP((1, 4, 4), 3, ())] == [nn.Flatten, nn.Linear]


def test_cnn_of_the_paper() -> None:
    shapes = {name: tuple(p.shape) for name, p in CNN((3, 32, 32), 10).named_parameters() if p.dim() > 1}
    assert shapes == {
        "conv1.weight": (16, 3, 3, 3),
        "conv2.weight": (16, 16, 3, 3),
        "conv3.weight": (16, 16, 3, 3),
        "readout.weight": (10, 1024),
    }
    two = CNN((3, 32, 32), 10, kernel=2)
    assert two(torch.rand(2, 3, 32, 32, generator=seeded(0))).shape == (2, 10)
    assert two.get_parameter("readout.weight").shape == (10, 16 * 6 * 6)


@pytest.mark.parametrize("norm", ["group", "batch", "none"])
def test_resnet_norms(norm: str) -> None:
    model = ResNet((1, 9, 9), 3, (4, 6), blocks=2, norm=norm, generator=seeded(0))  # type: ignore[arg-type]
    x = torch.rand(5, 1, 9, 9, generator=seeded(1))
    output = model(x)
    assert output.shape == (5, 3)
    alone = torch.cat([model(sample[None]) for sample in x])
    assert torch.allclose(output, alone, atol=1e-5) == (norm != "batch")
    kinds = {"group": {nn.GroupNorm}, "batch": {nn.BatchNorm2d}, "none": set()}
    assert {type(m) for m in model.modules()} & {nn.GroupNorm, nn.BatchNorm2d} == kinds[norm]


def test_vae_loss_is_the_bound() -> None:
    model = VAE((1, 3, 3), hidden=(7, 5), latent=2, generator=seeded(0))
    x = torch.rand(4, 1, 3, 3, generator=seeded(1))
    noise = torch.randn(4, 2, generator=seeded(2))
    output = model(x, noise)
    mean, log_variance = model.encode(x)
    torch.testing.assert_close(output.logits, model.decode(mean + (log_variance / 2).exp() * noise))
    code = torch.distributions.Normal(mean, (log_variance / 2).exp())
    kl = torch.distributions.kl_divergence(code, torch.distributions.Normal(0.0, 1.0)).sum(1)
    probability = output.logits.sigmoid()
    entropy = -(x * probability.log() + (1 - x) * (1 - probability).log()).flatten(1).sum(1)
    torch.testing.assert_close(vae_loss(output, x, beta=0.3), entropy + 0.3 * kl)
    torch.testing.assert_close(vae_loss(output, x), entropy + kl)
    weighted = VAE((1, 3, 3), hidden=(7, 5), latent=2, beta=0.3, generator=seeded(0))
    torch.testing.assert_close(vae_loss(weighted(x, noise), x), entropy + 0.3 * kl)
    torch.testing.assert_close(model(x).logits, model.decode(mean))
    widths = [m.out_features for m in model.modules() if isinstance(m, nn.Linear)]
    assert widths == [7, 5, 2, 2, 5, 7, 9]
    sampling = VAE((1, 3, 3), hidden=(7, 5), latent=2, sampling=True, generator=seeded(0))
    with torch.random.fork_rng():
        assert not torch.equal(sampling(x).logits, sampling(x).logits)
    torch.testing.assert_close(sampling.eval()(x).logits, model.decode(mean))


def test_transformer_attention_is_softmax_attention() -> None:
    model = Transformer((5,), 3, vocabulary=11, width=8, heads=2, depth=1)
    tokens = torch.randint(11, (4, 5), generator=seeded(0))
    assert model(tokens).shape == (4, 3)
    attention = model.blocks[0].attention
    x = torch.randn(4, 5, 8, generator=seeded(1))
    layers = (attention.query, attention.key, attention.value)
    q, k, v = (layer(x).reshape(4, 5, 2, 4).permute(0, 2, 1, 3) for layer in layers)
    weights = (q @ k.mT / math.sqrt(4)).softmax(-1)
    expected = attention.out((weights @ v).permute(0, 2, 1, 3).reshape(4, 5, 8))
    torch.testing.assert_close(attention(x), expected)


def test_transformer_sees_order_and_takes_vectors() -> None:
    model = Transformer((6, 4), 2, width=8, heads=2)
    x = torch.randn(3, 6, 4, generator=seeded(0))
    assert not torch.allclose(model(x), model(x.flip(1)), atol=1e-6)


def test_models_train_under_vmap() -> None:
    x = torch.rand(4, *IMAGES, generator=seeded(9))
    for name in ("mlp", "cnn", "resnet", "transformer"):
        models = [build(name, IMAGES, 2, generator=seeded(s)) for s in range(3)]
        params, buffers = stack_module_state(models)
        stacked = vmap(lambda p, b, m=models[0]: functional_call(m, (p, b), (x,)))(params, buffers)
        one_by_one = torch.stack([model(x) for model in models])
        torch.testing.assert_close(stacked, one_by_one, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("lenet", IMAGES, {}, "no model 'lenet'"),
        ("mlp", IMAGES, {"widths": 3}, "it has: hidden"),
        ("mlp", IMAGES, {"activation": "swoosh"}, "swoosh"),
        ("mlp", IMAGES, {"bias": [True]}, "2 layers"),
        ("mlp", IMAGES, {"init_scale": -1.0}, "init_scale=-1"),
        ("mlp", IMAGES, {"init": "xavier"}, "torch, normal"),
        ("mlp", IMAGES, {"parametrisation": "mup"}, "standard, ntk"),
        ("mlp", IMAGES, {"parametrisation": "ntk", "init": "torch"}, "ntk"),
        ("mlp", IMAGES, {"hidden": (0,)}, "at least 1"),
        ("mlp", (), {}, "input_shape"),
        ("cnn", (64,), {}, "images"),
        ("cnn", (1, 4, 4), {"kernel": 2}, "used up after conv2"),
        ("cnn", IMAGES, {"channels": ()}, "no convolution"),
        ("resnet", IMAGES, {"norm": "layer"}, "group, batch, none"),
        ("resnet", IMAGES, {"blocks": 0}, "at least one"),
        ("vae", IMAGES, {"latent": 0}, "latent=0"),
        ("vae", IMAGES, {"beta": -1.0}, "beta=-1.0"),
        ("transformer", IMAGES, {"patch": 3}, "patch=3"),
        ("transformer", (7,), {}, "vocabulary"),
        ("transformer", IMAGES, {"vocabulary": 3}, "tokens"),
        ("transformer", IMAGES, {"heads": 7}, "heads=7"),
    ],
)  # fmt: skip
def test_wrong_options_are_explained(
    name: str, shape: tuple[int, ...], options: dict[str, object], message: str
) -> None:
    assert_refused(message, build, name, shape, 3, **options)
