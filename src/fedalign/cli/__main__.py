"""Lets ``python -m fedalign.cli`` do the same as the command ``fedalign``."""

import sys

from fedalign.cli import main

if __name__ == "__main__":
    sys.exit(main())
