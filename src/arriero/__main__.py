"""The entry point: handles signals before the slow imports."""

import faulthandler
import os
import signal
import sys
import time


def main() -> None:
    if "train" in sys.argv:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os._exit(128 + number))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        os.environ["ARRIERO_STARTED"] = str(time.time())
        # SIGUSR2 prints the stacks of all threads, also while the main thread waits in native code
        faulthandler.register(signal.SIGUSR2, all_threads=True, chain=False)
    from arriero.cli import main

    main()


if __name__ == "__main__":
    main()
