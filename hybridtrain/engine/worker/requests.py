"""The requests of a worker: each waits for its answer."""

from __future__ import annotations

from typing import Any

from hybridtrain.engine.protocol.messages import Request
from hybridtrain.engine.worker.inbox import Inbox
from hybridtrain.engine.worker.pushes import Pushes
from hybridtrain.engine.worker.surroundings import Connection


class Requests:
    """Sends what the server has to know first, then a request, and waits for the answer.

    Args:
        line: to the server.
        inbox: receives the answers.
        pushes: are settled first.
    """

    def __init__(self, line: Connection, inbox: Inbox, pushes: Pushes) -> None:
        self._line, self._inbox, self._pushes = line, inbox, pushes

    def ask(
        self, request: Request, kind: type[Any], in_step: bool = False, settles: bool = True
    ) -> tuple[Any, int | None]:
        """The answer, of this kind, with the descriptor sent beside it.

        ``in_step``: in a step, which a restarted worker repeats. ``settles``: the offered push is
        settled before.
        """
        if settles:
            self._pushes.settle()
        self._pushes.send_changes(made=True)
        self._line.send(request)
        return self._inbox.answer(kind, in_step)
