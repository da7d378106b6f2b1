"""``python -m hybridtrain.simulate``."""

import sys

from hybridtrain.simulate.simulate_cli import main

sys.exit(main())
