"""Write files with ``torch.save``, with checksums that show damage."""

from __future__ import annotations

import io
from typing import Any

import torch

from hybridtrain.util.files import seal


def serialized(content: Any) -> io.BytesIO:
    """The content as ``torch.save`` writes it, sealed; see :mod:`hybridtrain.util.files`."""
    from torch.utils.serialization import config  # it would cost every import of Lightning

    written = io.BytesIO()
    with config.patch("save.compute_crc32", True):  # type: ignore[attr-defined]
        torch.save(content, written)
    seal(written)
    return written
