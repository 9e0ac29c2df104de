"""Where the `jitgemm` command starts: outside of the package, which imports torch unless this module is loaded."""

from __future__ import annotations


def main() -> None:
    """Run the command with the arguments of this process."""
    from jitgemm.cli import main

    main()
