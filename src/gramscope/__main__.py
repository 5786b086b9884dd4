"""``python -m gramscope``: the command line without an installed script."""

from gramscope.cli.app import main

if __name__ == "__main__":
    main()
