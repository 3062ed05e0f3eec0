"""What differs between two recordings; exits 1 if anything does.

python tests/golden/compare.py A.json B.json
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from golden.hashes import differences, read  # noqa: E402

SHOWN = 20


def main() -> int:
    """Print the differences, by part and the first in full."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    options = parser.parse_args()
    a, b = read(options.a), read(options.b)
    found = differences(a, b)
    counts, totals = (Counter(key.partition("/")[0] for key in keys) for keys in (found, a.keys() | b.keys()))
    for part, total in sorted(totals.items()):
        print(f"{part}: {counts[part]} of {total} differ")
    for key in found[:SHOWN]:
        print(f"{key}\n  {a.get(key, 'absent')}\n  {b.get(key, 'absent')}")
    if len(found) > SHOWN:
        print(f"and {len(found) - SHOWN} more")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
