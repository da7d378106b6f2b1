"""``python -m hybridtrain``, and the console script of the same name."""

from __future__ import annotations

import signal
import sys
import threading

# Until main() is ready for it, Ctrl-C ends this process at once, without a traceback of imports.
if threading.current_thread() is threading.main_thread() and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from hybridtrain.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
