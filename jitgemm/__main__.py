"""`python -m jitgemm`: the command."""

from jitgemm.cli import main

if __name__ == "__main__":
    main()
