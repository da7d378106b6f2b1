"""``python -m hybridtrain.simulate``."""

import sys

from hybridtrain.simulate.cli import main

sys.exit(main())
