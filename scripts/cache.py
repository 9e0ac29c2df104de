#!/usr/bin/env python3
"""`jitgemm cache` for people in a checkout: `python scripts/cache.py ls`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jitgemm.cli import main

if __name__ == "__main__":
    main(["cache", *sys.argv[1:]])
