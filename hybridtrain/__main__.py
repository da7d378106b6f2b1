"""``python -m hybridtrain``, and the console script of the same name."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

# Until main() is ready for it, Ctrl-C ends the command at once, without a traceback of imports.
# Not where this is only imported.
if (__name__ == "__main__" or Path(sys.argv[0]).stem == "hybridtrain") and (
    signal.getsignal(signal.SIGINT) is signal.default_int_handler
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from hybridtrain.cli.entry import main

if __name__ == "__main__":
    sys.exit(main())
