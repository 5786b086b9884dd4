"""The cases run inside torchrun launches (test_launches.py), so that pytest does not import them."""

collect_ignore_glob = ["*_cases.py", "worker.py"]
