"""The `outrider` command, and `python -m outrider`.

Nothing heavy is imported before Ctrl-C is looked after: the imports take a good second.
"""

import sys

# 128 and the number of SIGINT, as shells have it.
INTERRUPTED = 130


def main() -> None:
    """Run the command; Ctrl-C at any moment is a word on stderr and exit code 130."""
    try:
        from outrider.cli import main as command

        command()
    except KeyboardInterrupt:
        sys.stderr.write("\ninterrupted\n")
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
