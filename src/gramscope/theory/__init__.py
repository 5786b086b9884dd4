"""Early-time theory of the neural feature ansatz: what the data alone says about how feature learning starts.

======================  ===============================================================================================
``early_time``          ẆᵀẆ, ẆᵀKẆ and their correlation from (D, K), from tangents, or from a kernel
``network``             the same for any ``nn.Module`` and loss, and a check against a few steps of gradient descent
``activations``         activations with Gaussian averages in closed form
``tangent_kernels``     mean tangent kernels in closed form: infinite width, or one hidden layer of any width
``random_mlp``          nets drawn at random and their tangents
``montecarlo``          means over sampled initialisations, with error bars
``freeness``            moments of words in free families, by the non-crossing partitions of ``partitions``
``gaussian``            exact moments of the same words for Gaussian weights
``quadratic``           the one-hidden-layer quadratic net: observed, free and exact traces
``published_formulas``  the formulas of [NFA] Appendix E beside the general rule
======================  ===============================================================================================
"""
