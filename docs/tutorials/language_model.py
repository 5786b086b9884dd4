# %% [markdown]
# # A Hugging Face language model, layer by layer
#
# A GPT-2 of three blocks learns to predict the next character of a real text: the source code of gramscope itself, which is
# on your disk already. Any other model of `transformers` is measured by the same line. You need `gramscope[transformers,lab]`.

# %%
from pathlib import Path

import matplotlib.pyplot as plt
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import gramscope as gs

source = "".join(
    path.read_text(encoding="utf-8")
    for path in sorted(Path(gs.__file__).parent.glob("measures/*.py"))
)
text = source.encode("ascii", "ignore").decode().lower()
letters = sorted(set(text))
codes = torch.tensor([letters.index(letter) for letter in text])
print(len(text), "characters,", len(letters), "different ones")

# %%
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=len(letters),
    n_positions=32,
    n_embd=64,
    n_layer=3,
    n_head=4,
    bos_token_id=None,
    eos_token_id=None,
    initializer_range=0.1,
    resid_pdrop=0.0,
    embd_pdrop=0.0,
    attn_pdrop=0.0,
)
model = GPT2LMHeadModel(config)


def sequences(n):
    starts = torch.randint(len(codes) - 32, (n,))
    return codes[starts[:, None] + torch.arange(32)]


held = sequences(80)
batches = [{"input_ids": part, "labels": part} for part in held.split(20)]

# %% [markdown]
# ## Measure before, train, measure after
#
# The batches have the labels that `transformers` expects, and the model's own loss is used. gramscope asks the model whether it
# shifts its labels, so *target linearity* is that of the **next** character.

# %%
names = ["target_linearity", "nfa", "nfa_null", "gradient_norm"]
start = gs.measure(model, batches, measures=["target_linearity"], progress=False)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for step in range(200):
    ids = sequences(24)
    optimizer.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()

table = gs.measure(model, batches, measures=names, sketch=4, progress=False)
print(table)

# %% [markdown]
# ## By kind of layer
#
# A transformer repeats its block, so the useful view is kind of layer against depth; `table.by_block()` prints it.

# %%
kinds = {
    "attn.c_attn": "attention, q k v",
    "attn.c_proj": "attention, output",
    "mlp.c_fc": "MLP in",
    "mlp.c_proj": "MLP out",
}
figure, axes = plt.subplots(1, 2, figsize=(8, 3), sharey=True)
for place, (title, found) in zip(
    axes, (("at the start", start), ("after 200 steps", table)), strict=True
):
    for kind, label in kinds.items():
        values = [
            found[f"transformer.h.{block}.{kind}"]["target_linearity"]
            for block in range(3)
        ]
        place.plot(range(3), values, marker="o", label=label)
    place.set(title=title, xlabel="block", xticks=range(3))
axes[0].set_ylabel("target linearity of the next character")
axes[1].legend(fontsize=7)
plt.show()

# %% [markdown]
# Every point is the target linearity of that layer's **inputs**. The inputs of *q k v* and of *MLP in* are the residual
# stream after its norm: after training the next character is easier to read from it the deeper you look. The inputs of
# *MLP out* are 256 hidden units instead of 64, so their level is higher; compare them with each other. Those of
# *attention, output* are mixtures of earlier positions.
#
# Padding, large vocabularies and other kinds of models: [your model](../models.md).
