"""The entry point: handles signals before the slow imports."""

import os
import signal
import sys


def main() -> None:
    if "train" in sys.argv:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os._exit(128 + number))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    from arriero.cli import main

    main()


if __name__ == "__main__":
    main()
