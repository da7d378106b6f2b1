"""The espeak-ng voices of ``data=spoken_digits``, and which of them each split hears.

A voice is an accent plus a variant ("en-us+f2"). The variant makes the speaker (formants, pitch,
breath), so that the splits are disjoint in variants; accents are shared. Variants that sound
alike (small distance between mean and spread of their MFCC) are on the same side. Left out:
whispers, robots, effects, and voices meant for other languages.
"""

from __future__ import annotations

ACCENTS = (
    "en",
    "en-us",
    "en-gb-scotland",
    "en-gb-x-gbclan",
    "en-gb-x-gbcwmd",
    "en-gb-x-rp",
    "en-029",
    "en-us-nyc",
)

TRAIN = """
Alex Andrea Denis Diogo Gene Gene2 Henrique Hugo Jacky Marco Mario Michael Mike Nguyen Reed
RicishayMax RicishayMax2 RicishayMax3 adam anika announcer antonio aunty belinda benjamin ed edward
edward2 f1 f4 grandma grandpa gustave ian iven iven2 iven3 iven4 john klatt klatt3 klatt4 klatt5
klatt6 linda m1 m2 m3 m6 m7 m8 max michel miguel mike2 paul pedro steph steph2 steph3 victor
"""
VAL = """
Annie Lee boris david f3 marcelo norbert sandro
"""
TEST = """
Alicia Andy f2 f5 m4 m5 pablo quincy rob robert shelby travis
"""

SPEAKERS = {"train": TRAIN.split(), "val": VAL.split(), "test": TEST.split()}
