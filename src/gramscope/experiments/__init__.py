"""One small file per published figure family."""
