"""gramscope inside scikit-learn, torchmetrics, Arrow and notebooks. Each file needs an optional extra, loaded on import."""
