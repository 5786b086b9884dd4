"""Early-time theory of the neural feature ansatz: what the data alone says about how feature learning starts.

=====================  ================================================================================================
``early``              ẆᵀẆ, ẆᵀKẆ and their correlation from (D, K), from tangents, or from a kernel
``network``            the same for any ``nn.Module`` and loss; the second-difference check of a real run
``kernels``            mean tangent kernels in closed form: infinite width, or one hidden layer of any width
``montecarlo, mlp``    the same means over sampled initialisations, with error bars
``freeness, gaussian`` moments of words in free families; exact moments for Gaussian weights
``quadratic``          the one-hidden-layer quadratic net: observed, free and exact traces
``printed, checks``    the published formulas beside the general rule and Monte Carlo
``sweeps``             records of prediction beside observation
=====================  ================================================================================================
"""
