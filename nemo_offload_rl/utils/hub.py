"""The Hugging Face hub, which many hosts cannot reach although its cache has their models and data sets."""

import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from nemo_offload_rl.errors import UserError, first_line

logger = logging.getLogger(__name__)

_ANSWER_S = 10.0  # a host without a network mostly knows it at once
_NAME = re.compile(r"[\w-][\w.-]*(/[\w.-]+)?")


@contextmanager
def looking_up(name: str) -> Iterator[None]:
    """Surround a call that looks for a model, tokenizer or data set, in the hub unless `name` is a path.

    Without a hub, its cache is read at once. The hub library's warnings are hidden, two lines for each of its tries: a
    call that fails is told in one line.
    """
    if _NAME.fullmatch(name) and not Path(name).exists():
        _read_cache_without_hub()
    noisy = logging.getLogger("huggingface_hub.utils._http")
    level = noisy.level
    noisy.setLevel(logging.ERROR)
    try:
        yield
    finally:
        noisy.setLevel(level)


@cache
def _read_cache_without_hub() -> None:
    """Turn `HF_HUB_OFFLINE` on for this process, and those that it starts, if the hub does not answer twice.

    Otherwise the libraries try for 23 s to find each file that the cache has, and vLLM ends with an error.
    """
    from huggingface_hub import constants

    if os.environ.get("HF_HUB_OFFLINE") == "1":  # a prepared process got it after it had imported the library
        constants.HF_HUB_OFFLINE = True
    if constants.HF_HUB_OFFLINE or _no_answer(constants.ENDPOINT) is None:
        return
    if (reason := _no_answer(constants.ENDPOINT)) is not None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True
        logger.warning(
            "the hub %s cannot be reached (%s): models and data sets come from its cache on this host; with "
            "HF_HUB_OFFLINE=1 nothing is tried",
            constants.ENDPOINT,
            reason,
        )


def _no_answer(endpoint: str) -> str | None:
    """Return why a server does not answer; None if it does, whatever it says.

    Raises:
        UserError: A proxy needs a package that is not installed.
    """
    import httpx
    from huggingface_hub import get_session

    try:
        get_session().head(endpoint, timeout=_ANSWER_S)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return first_line(error)
    except ImportError as error:  # without it, the library does not read its cache either
        raise UserError(
            f"the hub cannot be asked through the proxy of ALL_PROXY, HTTPS_PROXY or HTTP_PROXY ({first_line(error)}); "
            "install that package, or unset the variable"
        ) from error
    return None
