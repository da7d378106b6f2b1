"""What a worker hands over, in fewer bytes: whole numbers with a scale, or the largest elements.

A codec encodes one parameter; a compressor does so for one worker and one optimizer, and remembers
what rounding has left out.
"""

from hybridtrain.exchanges.compression.compressor import (
    Codec,
    Compressor,
    bytes_of,
    codec_of,
    decode,
)
from hybridtrain.exchanges.compression.known import CODECS, CodecSpec, make_codec

__all__ = [
    "CODECS",
    "Codec",
    "CodecSpec",
    "Compressor",
    "bytes_of",
    "codec_of",
    "decode",
    "make_codec",
]
