"""Version of the weights that an engine serves."""

from __future__ import annotations

import asyncio


class ServedWeights:
    """Version of an engine's weights, for requests; used on the engine's event loop.

    Attributes:
        version: Number of refits so far.
        runs: Cleared while the engine is paused for new weights.
    """

    def __init__(self) -> None:
        self.version = 0
        self.runs = asyncio.Event()
        self.runs.set()

    async def next_version(self) -> int:
        """Version of a request that begins now; waits for the end of a pause, which brings the next version."""
        await self.runs.wait()
        return self.version
