"""Matrix functions: tensors in, tensors out."""
