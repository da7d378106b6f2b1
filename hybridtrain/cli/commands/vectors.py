"""Questions to word vectors that a run has written.

    python -m hybridtrain vectors FILE most_similar=WORD [analogies=FILE] [similarity=FILE] [top=N]

FILE is vectors.bin or vectors.txt of a run (task=word2vec or glove), or any in word2vec's format.

Options:
  most_similar=WORD   the words nearest to it; also a sum, as in king-man+woman
  analogies=FILE      how many of its questions (a b c d in each line) are answered rightly
  similarity=FILE     rank correlation with what people have said (word word score in each line)
  top=N               how many words most_similar shows (default 10)
"""

from __future__ import annotations

from collections.abc import Sequence

from hybridtrain.errors import UserError
from hybridtrain.tasks.words.questions import KnownWords
from hybridtrain.util.arguments import command, options

KNOWN = ("most_similar", "analogies", "similarity", "top")


def run(arguments: Sequence[str]) -> None:
    """Answer, one line each."""
    if not arguments:
        raise UserError("no file was given; give vectors.bin or vectors.txt of a run")
    file, *rest = arguments
    given = options(rest, KNOWN)
    top = given.pop("top", "10")
    if not top.isdecimal() or int(top) < 1:
        raise UserError(f"top={top}: give a number from 1 on")
    if not given:
        raise UserError(f"nothing was asked; give one of {', '.join(KNOWN[:-1])}")
    known = KnownWords.of_file(file)
    if (question := given.get("most_similar")) is not None:
        for word, alike in known.most_similar(question, int(top)):
            print(f"{alike:.4f}  {word}")
    if (path := given.get("similarity")) is not None:
        found = known.similarity(path)
        print(
            f"similarity  rank correlation {found.correlation:.4f}  pairs {found.pairs}  "
            f"without a vector {found.unknown}"
        )
    if (path := given.get("analogies")) is not None:
        for each in known.analogies(path):
            share = f"{100 * each.right / each.asked:.1f} %" if each.asked else "-"
            print(
                f"analogies  {each.section}  right {each.right} of {each.asked} ({share})  "
                f"without a vector {each.unknown}"
            )


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line: 0, or 2 after one line on standard error."""
    return command(run, __doc__, arguments)
