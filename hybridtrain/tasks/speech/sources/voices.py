"""The espeak-ng voices of ``data=spoken_digits``, and which of them each split hears.

A voice is an accent plus a variant ("en-us+f2"). The variant makes the speaker (formants, pitch,
breath), so that the splits are disjoint in variants; accents are shared. How alike two variants are
was measured by the distance between mean and spread of their MFCC (in standard deviations over all
variants): twins (below 2) are on the same side, and caricatures unlike every other voice (above
4.1) are in training. Left out: whispers, robots, effects, and voices made for other languages.
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
Alex Alicia Andrea Denis Diogo Gene Gene2 Henrique Hugo Jacky Lee Marco Mario Mike Reed
RicishayMax RicishayMax2 RicishayMax3 adam anika announcer antonio aunty benjamin boris ed edward
edward2 f1 f4 grandma grandpa ian iven iven2 iven3 iven4 klatt klatt3 klatt4 klatt5 klatt6 m1 m2
m3 m6 m7 m8 max michel miguel mike2 pablo paul pedro shelby steph steph2 steph3 travis victor
"""
VAL = """
Michael belinda david f3 gustave marcelo norbert sandro
"""
TEST = """
Andy Annie Nguyen f2 f5 john linda m4 m5 quincy rob robert
"""

SPEAKERS = {"train": TRAIN.split(), "val": VAL.split(), "test": TEST.split()}
