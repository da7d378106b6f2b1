"""Speech recognition with CTC: data, acoustic models, decoding."""
