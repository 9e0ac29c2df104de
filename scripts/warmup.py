#!/usr/bin/env python3
"""`jitgemm warmup` for people in a checkout: `python scripts/warmup.py --model config.json`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jitgemm.cli import main

if __name__ == "__main__":
    main(["warmup", *sys.argv[1:]])
