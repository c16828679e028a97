"""Compares a response that sleeps in its middle, its KV blocks kept on the host, with one that does not.

python slept_responses.py FOLDER VERDICTS
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from engine_process import engine_here, engine_settings, with_graphs
from model_families import save_family_folder

from nemo_offload_rl.keys.generation import SamplingSettings

PROMPT = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(0)).tolist()
SAMPLING = SamplingSettings(max_new_tokens=340, temperature=0.0)


def main(folder: Path, verdicts: Path) -> None:
    on_gpu = torch.cuda.is_available()
    save_family_folder(folder, "qwen3")
    engine = engine_here(
        engine_settings(
            folder,
            async_engine=True,
            precision="bfloat16" if on_gpu else "float32",
            kept_kv_bytes=2**30,
            **with_graphs(load_format="auto"),
        )
    )
    engine.generate([PROMPT], replace(SAMPLING, max_new_tokens=8))  # kernels are compiled
    started_s = time.monotonic()
    ((whole,),) = engine.generate([PROMPT], SAMPLING)
    wait_s = (time.monotonic() - started_s) / 3
    put_away: list[int] = []
    rpc = engine._rpc

    def seen(method: str, args: tuple[Any, ...]) -> list[Any]:
        if method == "put_away_kv":
            put_away.append(len(args[0]))
        return rpc(method, args)

    engine._rpc = seen
    free_bytes = [0, 0]
    while True:
        answers: list[Any] = []
        asking = threading.Thread(target=lambda into: into.extend(engine.generate([PROMPT], SAMPLING)), args=(answers,))
        asking.start()
        time.sleep(wait_s)
        free_bytes[0] = torch.cuda.mem_get_info()[0] if on_gpu else 0
        engine.finish_generation(discard_weights=False)
        free_bytes[1] = torch.cuda.mem_get_info()[0] if on_gpu else 0
        has_slept = asking.is_alive()
        engine.prepare_for_generation()
        asking.join()
        if has_slept and put_away[-1]:
            break
        wait_s *= 0.7 if not has_slept else 1.5
    ((slept,),) = answers
    engine.shutdown()
    freed_bytes = free_bytes[1] - free_bytes[0]
    found = {"kept": put_away[-1], "freed_bytes": freed_bytes, "num_prompt": len(PROMPT)}
    verdicts.write_text(json.dumps({**found, "whole": asdict(whole), "slept": asdict(slept)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
