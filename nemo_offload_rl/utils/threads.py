"""Threads for code of users, which may never end: a process does not wait for them at its end."""

import threading
from collections.abc import Callable
from concurrent.futures import Future


def in_thread[**P, R](function: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
    """Call `function` in a thread of its own, at once, and return its result's future."""
    future: Future[R] = Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=getattr(function, "__name__", None), daemon=True).start()
    return future
