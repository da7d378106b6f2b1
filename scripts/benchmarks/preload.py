"""Import modules once, before measured processes are forked."""

from __future__ import annotations

import logging
import os

import pytorch_lightning  # noqa: F401
import torch
import torch.distributed
import torch.nn.parallel

import hybridtrain  # noqa: F401
from hybridtrain.cli.quiet import hush, hush_lightning

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
hush()
hush_lightning()
for name in ("pytorch_lightning", "lightning_fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
