"""Where many runs are computed: one after the other here, in threads, in processes, or on a cluster of machines.

:func:`executor` makes what ``runner.map_runs`` and ``runner.sweep`` take as ``executor=``. The cluster is Dask's, an
extra (requirements-cluster.txt) that is imported only where it is asked for. docs/hosting.md says how to start one.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

T = TypeVar("T")

Kind = Literal["threads", "processes", "cluster"]

ADDRESS = "DASK_SCHEDULER_ADDRESS"  # the environment variable with the scheduler's address
ANSWER_S = 3.0  # how long a scheduler may take to answer, and then to have a worker
WITHOUT_WORKERS_S = 15.0  # after this long without any, none is expected to come back; one that starts again takes 3 s


class ClusterUnavailable(RuntimeError):
    """There is no cluster to compute on; the message says why and what mends it. Runs can still be computed here."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"cluster at {address or 'no address'}: {why}")
        self.address, self.why = address, why

    def __reduce__(self) -> Any:  # exceptions cross process borders too
        return ClusterUnavailable, (self.address, self.why)


class OtherCode(RuntimeError):
    """A worker has other code than the one that asks it, so its numbers would not be those that were asked for."""

    def __init__(self, worker: str, got: str, wanted: str) -> None:
        super().__init__(
            f"worker on {worker}: got {got}; wanted {wanted}. Bring it to this checkout and this version of torch, "
            "and start it again"
        )
        self.worker, self.got, self.wanted = worker, got, wanted

    def __reduce__(self) -> Any:
        return OtherCode, (self.worker, self.got, self.wanted)


class WorkersLost(RuntimeError):
    """The processes that computed are gone, and with them what they had begun; what came back before is kept."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{why}. Results that had come back are kept: run it again for the others")
        self.why = why

    def __reduce__(self) -> Any:
        return WorkersLost, (self.why,)


@contextmanager
def executor(kind: Kind | None = None) -> Iterator[concurrent.futures.Executor | None]:
    """An executor for the ``with`` block, closed at its end; None stands for the caller's own thread.

    Without a kind: the cluster where ``DASK_SCHEDULER_ADDRESS`` is set, else threads.

    ``threads``    on two cores None: measured there, two threads took as long as one (the small steps of a run hold
                   Python's lock) or longer, and a page wants a core too. On more, half of the cores, for the same page
    ``processes``  all cores but one, each with one torch thread; on two cores None. A spawned process imports the main
                   script again: for commands, not for pages
    ``cluster``    the workers of the Dask scheduler at the address; each needs the same checkout

    Raises: ClusterUnavailable.
    """
    if kind is None:
        kind = "cluster" if os.environ.get(ADDRESS) else "threads"
    if kind == "cluster":
        with _cluster(os.environ.get(ADDRESS, "")) as remote:
            yield remote
    elif cores() <= 2:
        yield None
    elif kind == "threads":
        with concurrent.futures.ThreadPoolExecutor(cores() // 2, thread_name_prefix="run") as threads:
            yield threads
    elif kind == "processes":
        context = multiprocessing.get_context("spawn")  # a forked torch inherits locks that nobody will open
        with concurrent.futures.ProcessPoolExecutor(cores() - 1, context, _settle) as processes:
            yield processes
    else:
        raise ValueError(f"kind of executor: got {kind!r}, wanted threads, processes or cluster")


def cores() -> int:
    """Cores that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return os.cpu_count() or 1


def _settle() -> None:
    """What a new process does before its first run."""
    from engine.runner import settle_process

    settle_process()


@contextmanager
def _cluster(address: str) -> Iterator[concurrent.futures.Executor]:
    if not address:
        raise ClusterUnavailable(address, f"set {ADDRESS} to the scheduler's address, as tcp://host:8786")
    try:
        import distributed
    except ImportError as error:
        why = f"the package distributed can't be imported ({error}); pip install -r requirements-cluster.txt"
        raise ClusterUnavailable(address, why) from error
    # Made in two steps, so that a client that did not get through can be closed, with its thread. Left to the garbage
    # collector it is closed at any later moment, and where that is inside the making of another one, both wait for one
    # lock; and one that is closed already leaves its thread behind.
    client: Any = distributed.Client.__new__(distributed.Client)
    try:
        client.__init__(address, timeout=ANSWER_S, set_as_default=False)
    except (OSError, ValueError) as error:
        client.close()
        client._loop_runner.stop()
        why = f"no scheduler answers ({error}); start one with `python -m dask scheduler`, or unset {ADDRESS}"
        raise ClusterUnavailable(address, why) from error
    try:
        try:
            client.wait_for_workers(1, timeout=ANSWER_S)
        except TimeoutError as error:
            why = f"the scheduler has no worker; start one with `python -m dask worker {address} --nthreads 1`"
            raise ClusterUnavailable(address, why) from error
        yield Cluster(client)
    finally:
        client.close(timeout=ANSWER_S)


class Cluster(concurrent.futures.Executor):
    """Calls carried out by the workers of a Dask scheduler.

    Dask gives what a lost worker had begun to another one; with no worker left it would wait for ever.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._calls = client.get_executor(pure=False)  # pure: results are kept there by call; here the runner does it
        self._asked_at = self._workers_at = time.monotonic()

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> concurrent.futures.Future[T]:
        """The future of a call; cancelling it cancels the call as long as no worker has begun it."""
        future: concurrent.futures.Future[T] = self._calls.submit(call, *args, **kwargs)
        return future

    def check_workers(self) -> None:
        """Ask the scheduler, once a second at most, whether there are workers.

        Raises: WorkersLost after :data:`WITHOUT_WORKERS_S` without any.
        """
        now = time.monotonic()
        if now - self._asked_at < 1:
            return
        self._asked_at = now
        with contextlib.suppress(OSError):  # a lost connection cancels the futures, which says it
            if self._client.scheduler_info(n_workers=1)["workers"]:
                self._workers_at = now
        if now - self._workers_at > WITHOUT_WORKERS_S:
            raise WorkersLost("the scheduler has no worker left; their logs say why (one without this checkout ends)")


@contextmanager
def explained() -> Iterator[None]:
    """Around the use of an executor: what it says of its own end becomes WorkersLost or OtherCode, the rest passes."""
    try:
        yield
    except concurrent.futures.CancelledError as error:  # who cancels here does not ask for the result
        raise WorkersLost("the connection to the scheduler is lost") from error
    except concurrent.futures.BrokenExecutor as error:
        raise WorkersLost(f"a worker process ended during a run, perhaps for lack of memory ({error})") from error
    except _killed_worker() as error:
        raise WorkersLost(f"several workers died over the same run, perhaps for lack of memory ({error})") from error
    except RuntimeError as error:
        if "deserialization of the task graph" not in str(error):  # distributed has no type of its own for it
            raise
        here = "the engine of this checkout"
        raise OtherCode("the scheduler", f"an engine that is missing or older ({error.__cause__})", here) from error


def _killed_worker() -> tuple[type[Exception], ...]:
    """distributed's KilledWorker; nothing where it was not imported, so that none can have been raised."""
    scheduler = sys.modules.get("distributed.scheduler")
    return (scheduler.KilledWorker,) if scheduler else ()
