"""Every experiment by name. Listing needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gramscope.errors import InputError, no_such

if TYPE_CHECKING:
    from gramscope_lab.experiments.experiment import Experiment

#: the papers by the name they are cited with, see docs/references.md
PAPERS = {
    "[VCL]": "Cha & Lee, Feature Learning as a Virtual Covariance Learning",
    "[poster]": "Cha & Lee, Feature Learning as a Virtual Covariance Learning (poster)",
    "[Gram]": "The Weight Gram Matrix Captures Sequential Feature Linearization in Deep Networks",
    "[NFA]": "Beaglehole, Mitliagkas & Agarwala, Gradient descent induces alignment between weights and the "
    "pre-activation tangents for deep non-linear networks",
}


@dataclass(frozen=True)
class Entry:
    """One experiment of the catalogue.

    Args:
        name: what to pass to ``gramscope reproduce``.
        source: paper and figure, such as ``[NFA] Fig. 2``.
        title: what it shows, in one line.
        loader: ``module:attribute`` of this folder, an
            :class:`~gramscope_lab.experiments.experiment.Experiment`.
    """

    name: str
    source: str
    title: str
    loader: str

    def load(self) -> Experiment[Any]:
        """Import the experiment."""
        module, _, attribute = self.loader.partition(":")
        experiment: Experiment[Any] = getattr(import_module(f"gramscope_lab.experiments.{module}"), attribute)
        return experiment

    def to_dict(self) -> dict[str, str]:
        """The entry as plain values for JSON."""
        return {"name": self.name, "source": self.source, "title": self.title}


#: paper -> name, figure, title and loader of each of its experiments
_FIGURES = {
    "[VCL]": (
        ("vcl-fig1", "Fig. 1", "diagonals of WᵀW, AGOP and accumulated virtual covariance shift", "vcl_diagonals:FIG1"),
        ("vcl-fig2", "Fig. 2", "virtual covariance learning against SGD, accuracy over epochs", "methods_compared:VCL_FIG2"),
    ),
    "[poster]": (
        ("vcl-poster", "", "virtual covariance learning on a CNN, a deep net and a linear one", "methods_compared:POSTER"),
    ),
    "[Gram]": (
        ("gram-fig1", "Fig. 1", "a Swiss roll unrolled by the virtual update", "gram_unrolling:FIG1"),
        ("gram-fig2", "Fig. 2", "Gram-whitened against plain SGD on fully connected nets", "methods_compared:GRAM_FIG2"),
        ("gram-fig4", "Fig. 4", "target linearity and surrogate by layer over training with SGD", "gram_linearity:FIG4"),
        ("gram-fig5", "Fig. 5", "interpolation of a VAE's codes against pixels, and its bound", "gram_vae:FIG5"),
        ("gram-fig6", "Fig. 6", "Gram-whitened against plain SGD on convolutional nets", "methods_compared:GRAM_FIG6"),
        ("gram-fig7", "Fig. 7", "vcl-fig1 as the weight-Gram paper has it", "vcl_diagonals:FIG1"),
        ("gram-fig8", "Fig. 8", "rich and lazy regimes: what features lack, what the readout lacks", "gram_regimes:FIG8"),
        ("gram-fig9", "Fig. 9", "target linearity and surrogate by layer over training with Adam", "gram_linearity:FIG9"),
        ("gram-fig10", "Fig. 10", "target linearity of a VAE's codes and reconstruction error, by β", "gram_vae:FIG10"),
        ("gram-fig11", "Fig. 11", "target linearity by layer of BERT: random, pre-trained, fine-tuned", "gram_bert:FIG11"),
        ("gram-fig12", "Fig. 12", "target linearity and generalisation with random labels", "gram_linearity:FIG12"),
        ("gram-fig13", "Fig. 13", "grokking: accuracies and target linearity by layer", "gram_grokking:FIG13"),
        ("gram-fig14", "Fig. 14", "grokking: generalisation error and gap of linearity", "gram_grokking:FIG14"),
    ),
    "[NFA]": (
        ("nfa-fig1", "Fig. 1", "EGOP, NFM, AGOP and corrupted AGOP of a trained net", "nfa_matrices:FIG1"),
        ("nfa-fig2", "Fig. 2", "uncentred and centred NFA over training, by initialisation scale", "nfa_curves:FIG2"),
        ("nfa-fig3", "Fig. 3", "predicted and observed start of the C-NFA, alignment-reversing data", "nfa_theory:FIG3"),
        ("nfa-fig4", "Fig. 4", "share of the double-centred NFA in the centred one", "nfa_curves:FIG4"),
        ("nfa-fig5", "Fig. 5", "PTK-centred NFA over training, isotropic and decaying inputs", "nfa_curves:FIG5"),
        ("nfa-fig6", "Fig. 6", "first-order prediction and observed C-NFA over the data's decay", "nfa_theory:FIG6"),
        ("nfa-fig7", "Fig. 7", "nfa-fig2 on inputs with spectrum 1/(1+k)", "nfa_curves:FIG7"),
        ("nfa-fig8", "Fig. 8", "nfa-fig2 on inputs with spectrum 1/(1+k²)", "nfa_curves:FIG8"),
        ("nfa-fig9", "Fig. 9", "diagonals of NFM, AGOP and corrupted AGOP as images of faces", "nfa_matrices:FIG9"),
    ),
}  # fmt: skip
_ENTRIES = tuple(
    Entry(name, f"{paper} {figure}".strip(), title, loader)
    for paper, rows in _FIGURES.items()
    for name, figure, title, loader in rows
)


def catalogue() -> tuple[Entry, ...]:
    """Every experiment, family by family."""
    return _ENTRIES


def find(name: str) -> Entry:
    """The entry of a name; case and underscores do not matter."""
    by_name = {entry.name: entry for entry in _ENTRIES}
    plain = name.lower().replace("_", "-")
    if plain not in by_name:
        raise InputError(no_such("experiment", name, by_name))
    return by_name[plain]
