"""``python -m gramscope_lab``: the command line without an installed script."""

from gramscope_lab.command import main

if __name__ == "__main__":
    main()
