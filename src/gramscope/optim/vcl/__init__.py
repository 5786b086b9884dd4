"""Virtual covariance learning ([VCL] Algorithm 1). The optimizer is :class:`~gramscope.optim.vcl.optimizer.VCL`.

One step passes through these modules: ``model_hooks`` sees forward and backward passes, ``gradients`` collects each layer's
inputs and output gradients, ``matrix_trainer`` decides how to compute the step of each matrix, ``matrix_step`` computes it by
``exact`` or by ``recursion`` (``full_step``, ``light_step``), and ``optimizer`` writes weights and state. ``processes``
divides the matrices among several processes.
"""

from gramscope.optim.vcl.optimizer import VCL as VCL
