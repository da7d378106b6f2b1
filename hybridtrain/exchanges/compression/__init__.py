"""What a worker hands over, in fewer bytes: whole numbers with a scale, or the largest elements.

A codec encodes one parameter; a compressor does so for one worker and one optimizer, and remembers
what rounding has left out.
"""

from hybridtrain.exchanges.compression.codecs import CODECS, Codec, CodecSpec, codec_of, make_codec
from hybridtrain.exchanges.compression.compressor import Compressor, bytes_of, decode

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
