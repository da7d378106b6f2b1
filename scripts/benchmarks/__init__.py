"""The benchmark: ours against what a user would pick instead, side by side.

Theory of operation. A *part* (``plan.py`` lists them) is a function that gets a
:class:`~benchmarks.frame.Frame` and yields rows. Whatever is compared in a row runs in the same
call of the command, alternately (A B B A A B ...), each run in a fresh process tree, so that a
machine that grows slower or faster does so for both. Of each pair of neighbours the ratio is taken,
and of the ratios the median; the lowest and the highest of them are the spread. A run's own first
steps are its warm-up and do not count. Every process computes with one thread, unless its row says
otherwise (``OMP_NUM_THREADS=1``, ``torch.set_num_threads(1)``).

The processes are forks of one that has imported torch, Lightning and hybridtrain once (a
``multiprocessing`` fork server, which has trained nothing): importing takes longer than a
measurement. Only ``startup`` starts its commands from nothing, as that is what it measures.

A new part is a module in ``parts/`` with ``def rows(frame) -> Iterator[Row | Skipped]``, and a line
in ``plan.py``. What it trains lies in ``jobs/`` where it is long or others train it too. Most need
one call: ``yield from frame.alternate(work, ours, [(other, goal), ...])``, where ours and the
others are :class:`~benchmarks.runs.Job`: a function of ours, by name, with arguments that JSON can
hold. It runs in the fresh process and returns seconds, or any other figure of which less is better.
Where both sides are measured alternately in one process, a job returns
``{"ours": [...], "baseline": [...]}``, pair by pair, and ``yield from frame.together(...)`` makes
the row.
"""
