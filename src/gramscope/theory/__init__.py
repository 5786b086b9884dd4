"""Early-time theory of the neural feature ansatz: what the data alone says about how feature learning starts.

===================  ==================================================================================================
``early_time``       ẆᵀẆ, ẆᵀKẆ and their correlation from (D, K), from tangents, or from a kernel
``network``          the same for any ``nn.Module`` and loss
``tangent_kernels``  mean tangent kernels in closed form: infinite width, or one hidden layer of any width
``montecarlo``       random MLPs, and means over draws with error bars
``freeness``         moments of words in free families, by non-crossing partitions
``gaussian``         exact moments of the same words for Gaussian weights
``quadratic``        the one-hidden-layer quadratic net: observed, free and exact traces
===================  ==================================================================================================
"""
