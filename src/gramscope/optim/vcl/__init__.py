"""Virtual covariance learning ([VCL] Algorithm 1). The optimizer is :class:`~gramscope.optim.vcl.optimizer.VCL`.

One step: ``gradients`` has watched forward and backward passes and gives each matrix its gradient and ``Σ = Σ δδᵀ``,
summed over processes by ``processes``; ``exact`` or ``recursion`` computes the new weights; ``optimizer`` writes them.
"""

from gramscope.optim.vcl.optimizer import VCL as VCL
