"""The server's threads: results in order, no two tasks of one lane at a time."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from hybridtrain.engine.updates.thread_pool import Pool


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("n_tasks", [0, 1, 2, 10])
def test_results_come_in_the_order_of_the_tasks(size: int, n_tasks: int) -> None:
    pool = Pool(size)
    assert pool.map(lambda lane, task: task * task, range(n_tasks)) == [
        n * n for n in range(n_tasks)
    ]
    pool.close()


def test_a_lane_is_one_thread_at_a_time_and_lanes_run_side_by_side() -> None:
    pool, busy, together = Pool(3), set[int](), set[int]()
    barrier = threading.Barrier(3, timeout=10)
    lock = threading.Lock()

    def work(lane: int, task: int) -> int:
        with lock:
            assert lane not in busy
            busy.add(lane)
        if task < 3:
            barrier.wait()  # passes only if three lanes run at once
            together.add(lane)
        time.sleep(0.001)
        with lock:
            busy.discard(lane)
        return lane

    lanes = pool.map(work, range(12))
    pool.close()
    assert together == {0, 1, 2}
    assert set(lanes[:3]) == {0, 1, 2}
    assert set(lanes) == {0, 1, 2}


def test_a_single_task_stays_in_the_callers_thread() -> None:
    pool = Pool(4)
    assert pool.map(lambda lane, task: threading.current_thread(), [0]) == [
        threading.current_thread()
    ]
    assert not [t for t in threading.enumerate() if t.name.startswith("hybridtrain-update")]


def test_tasks_do_not_record_gradients_in_any_lane() -> None:
    pool = Pool(2)
    assert pool.map(lambda lane, task: torch.is_grad_enabled(), range(4)) == [False] * 4
    pool.close()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_in_any_lane_reaches_the_caller(failing: int) -> None:
    pool = Pool(2)

    def work(lane: int, task: int) -> None:
        if task == failing:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        pool.map(work, range(2))
    pool.close()


def test_a_lane_that_is_held_up_leaves_its_tasks_to_the_others() -> None:
    pool, free = Pool(2), threading.Event()

    def work(lane: int, task: int) -> int:
        if task == 0:
            assert free.wait(10)
        elif task == 9:
            free.set()  # reached only if the other lane takes all that is left
        return lane

    lanes = pool.map(work, range(10))
    assert set(lanes[1:]) == {1 - lanes[0]}
    pool.close()


def test_after_an_error_nothing_more_is_begun_and_the_pool_goes_on() -> None:
    pool, begun = Pool(2), list[int]()

    def work(lane: int, task: int) -> None:
        begun.append(task)
        raise ZeroDivisionError(task)

    with pytest.raises(ZeroDivisionError):
        pool.map(work, range(1000))
    assert len(begun) <= 2
    assert pool.map(lambda lane, task: task, range(3)) == [0, 1, 2]
    pool.close()


@pytest.mark.slow
def test_a_forgotten_pool_takes_its_threads_along() -> None:
    pool = Pool(3)
    pool.map(lambda lane, task: task, range(6))
    threads = [t for t in threading.enumerate() if t.name.startswith("hybridtrain-update")]
    assert len(threads) == 2
    del pool
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_closing_ends_the_threads_and_may_be_repeated() -> None:
    pool = Pool(3)
    pool.map(lambda lane, task: task, range(6))
    pool.close()
    pool.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("hybridtrain-update")]
