"""What benchmarks/step_trace.py makes of a trace of the profiler."""

import importlib.util
import sys
from pathlib import Path

PATH = Path(__file__).parents[2] / "benchmarks" / "step_trace.py"
spec = importlib.util.spec_from_file_location("step_trace", PATH)
assert spec is not None and spec.loader is not None
step_trace = importlib.util.module_from_spec(spec)
sys.modules["step_trace"] = step_trace
spec.loader.exec_module(step_trace)


def entry(name, kind, start_ms, took_ms, *, stream=None, num_bytes=0):
    arguments = {"stream": stream, "bytes": num_bytes}
    return {
        "ph": "X",
        "name": name,
        "cat": kind,
        "ts": 1e3 * start_ms,
        "dur": 1e3 * took_ms,
        "tid": 1,
        "args": arguments,
    }


def test_a_trace_tells_what_held_up_the_stream_that_computes_and_who_waited_on_the_host():
    events = step_trace.events_of(
        [
            entry("policy/worker.py(226): optim_step", "python_function", 0, 100),
            entry("void adam<float>(int)", "kernel", 0, 10, stream=7),
            entry("void adam<float>(int)", "kernel", 60, 10, stream=7),
            entry("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 10, 30, stream=20, num_bytes=10**9),
            entry("Memcpy DtoH (Device -> Pinned)", "gpu_memcpy", 30, 29, stream=20, num_bytes=10**9),
            entry("cudaStreamSynchronize", "cuda_runtime", 70, 20),
            entry("cudaLaunchKernel", "cuda_runtime", 1, 0.1),
            {"ph": "i", "name": "no duration", "ts": 0},
        ]
    )
    text = "\n".join(step_trace.describe(events))
    assert "stream 7, kernel: 2, busy 20.0 ms" in text
    assert "stream 20, Memcpy DtoH: 2, busy 49.0 ms, 2.00 GB" in text
    assert (
        "50.0 ms from 10.0 ms, ended by adam; Memcpy DtoH (Device -> Pinned) of stream 20 ended 1.0 ms before" in text
    )
    assert "cudaStreamSynchronize 20.0 ms from 70.0 ms: policy/worker.py(226): optim_step" in text
    assert "cudaLaunchKernel 0.1" not in text


def test_an_empty_trace_is_said_to_be_empty():
    assert step_trace.describe([]) == ["nothing was traced"]
