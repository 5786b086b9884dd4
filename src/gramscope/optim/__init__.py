"""Virtual covariance learning and Gram-whitened updates as PyTorch optimizers."""
