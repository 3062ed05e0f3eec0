"""`python -m fourbits`: the command `fourbits`, also where its script is not on the PATH."""

import sys

from fourbits.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
