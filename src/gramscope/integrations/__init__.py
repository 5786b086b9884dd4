"""gramscope inside other libraries' training loops, loggers and metrics. Each needs an optional extra."""
