"""``python -m hybridtrain.plan``."""

import sys

from hybridtrain.plan.plan_cli import main

sys.exit(main())
