"""``resume=...``: finding an earlier run and continuing it."""
