"""One vLLM engine in a process of its own, driven by JSON lines; started by `_engines.Host`.

usage: _engine_host.py SPEC COMMAND_FD ANSWER_FD

Requests are timed here, around `LLM.generate` with one output token: the engine core runs in its
own process (vLLM's default), and of the ways to reach it this one has the least machinery of its
own (no event loop, no HTTP), so that what differs between two arms is the engine.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from _disk import drop_page_cache, folder_bytes

# Between a request and the next measurement the GPU waits for the host and lowers its clocks.
BURN_SECONDS = 0.1
SETTLE_SECONDS = 60.0
STABLE_SECONDS = 0.1
# Operations of LakeCache's store that bring something back.
LOADING = ("hit", "read", "promote")


def tokens_of(seed: int, length: int, vocabulary: int, shared: int = 0, family: int = 0) -> list:
    """A prompt: `shared` tokens common to its family, the rest its own."""
    import numpy

    own = numpy.random.default_rng([1, seed, length]).integers(10, vocabulary - 10, length)
    if shared:
        common = numpy.random.default_rng([2, family]).integers(10, vocabulary - 10, shared)
        own[:shared] = common
    return own.tolist()


def _difference(now: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    return {name: n - before.get(name, 0) for name, n in now.items() if n != before.get(name, 0)}


class EngineHost:
    """Commands are the methods without a leading underscore."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        started = time.perf_counter()
        from vllm import LLM, SamplingParams

        self.import_s = time.perf_counter() - started
        self.sampling = SamplingParams
        self.vocabulary = spec["vocabulary"]
        self.switched = spec.get("switched", False)
        self.active: str | None = None
        started = time.perf_counter()
        self.llm = LLM(
            worker_extension_cls="_engine_hooks.Extension",
            disable_log_stats=False,
            **spec["engine"],
        )
        self.init_s = time.perf_counter() - started
        self.request_number = 0
        self.stages = spec.get("stages", False)
        if self.stages:
            self._call("bench_stages")

    def _call(self, method: str, *args: Any) -> Any:
        return self.llm.collective_rpc(method, args=args)[0]

    def started(self) -> dict[str, Any]:
        """Say what runs."""
        said = self._call("bench_started")
        self._call("bench_wait_ready", 60.0)
        said.update(import_s=self.import_s, init_s=self.init_s)
        return said

    def activate(self, name: str | None) -> None:
        """Choose the arm of an engine that has several; None is an engine without connector."""
        self.settle()
        self._call("bench_activate", name)
        self.active = name
        if name is not None:
            self._call("bench_wait_ready", 60.0)

    def settle(self, flush: bool = True) -> float:
        """Wait until nothing runs and everything stored has reached its last tier."""
        started = time.perf_counter()
        deadline = started + SETTLE_SECONDS
        while self._call("bench_pending"):
            if time.perf_counter() > deadline:
                raise TimeoutError("copies to the host do not end")
            time.sleep(0.002)
        if flush:
            self._call("bench_flush", SETTLE_SECONDS)
            folder = self.spec.get("watched", {}).get(self.active or "")
            self._until_stable(folder, deadline)
        return time.perf_counter() - started

    def _until_stable(self, folder: str | None, deadline: float) -> None:
        if not folder:
            return
        size, since = folder_bytes(folder), time.perf_counter()
        while time.perf_counter() - since < STABLE_SECONDS and time.perf_counter() < deadline:
            time.sleep(0.02)
            if (now := folder_bytes(folder)) != size:
                size, since = now, time.perf_counter()

    def reset(self) -> None:
        """Empty the GPU's prefix cache, which is refused while blocks are pinned."""
        deadline = time.perf_counter() + SETTLE_SECONDS
        while not self.llm.reset_prefix_cache():
            if time.perf_counter() > deadline:
                raise TimeoutError("reset_prefix_cache goes on answering False")
            time.sleep(0.005)

    def _metrics(self) -> dict[str, float]:
        seen = {}
        for metric in self.llm.get_metrics():
            if metric.name.startswith("vllm:external_prefix_cache") or metric.name in {
                "vllm:prefix_cache_hits",
                "vllm:prompt_tokens_cached_by_source",
            }:
                source = metric.labels.get("source")
                seen[metric.name[5:] + (f":{source}" if source else "")] = metric.value
        return seen

    def ask(self, tokens: list[int], max_tokens: int = 1, logprobs: int | None = None) -> dict:
        """Send one request; time from the call to the last of its tokens."""
        sampling = self.sampling(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=logprobs,
            detokenize=False,
        )  # fmt: skip
        before = self._counts()
        answer = self._timed(tokens, sampling)
        answer["counts"] = _difference(self._counts(), before)
        return answer

    def _counts(self) -> dict[str, float]:
        counted = self._call("bench_counters")
        return {**self._metrics(), **{f"lakecache:{name}": n for name, n in counted.items()}}

    def _timed(self, tokens: list[int], sampling: Any) -> dict[str, Any]:
        prompt = {"prompt_token_ids": tokens}
        if self.stages:
            self._call("bench_stages")
        started = time.perf_counter()
        output = self.llm.generate([prompt], sampling, use_tqdm=False)[0]
        spent = time.perf_counter() - started
        answer = {
            "ms": spent * 1e3,
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
        }
        if self.stages:
            answer["stages"] = [
                [what, count, round((begin - started) * 1e3, 3), round((end - started) * 1e3, 3)]
                for what, count, begin, end in self._call("bench_stages")
                if begin < started + spent
            ]
        if sampling.logprobs:
            answer["logprobs"] = [
                {str(token): value.logprob for token, value in step.items()}
                for step in output.outputs[0].logprobs
            ]
        return answer

    def turn(
        self, seed: int, length: int, cells: list[str], max_tokens: int = 1,
        flush: bool = True, shared: int = 0, family: int = 0, burn: float = BURN_SECONDS,
    ) -> dict[str, Any]:  # fmt: skip
        """Measure one prompt in some cells, in the order given.

        Between "cold" and "after_store" there is nothing at all, so their counts come together.
        """
        tokens = tokens_of(seed, length, self.vocabulary, shared, family)
        sampling = self.sampling(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self._call("bench_collect")
        gc.collect()
        gc.disable()
        seen: dict[str, Any] = {}
        before: dict[str, float] = {}
        try:
            for cell, following in zip(cells, [*cells[1:], ""], strict=True):
                if cell == "gpu_hit":
                    # Until everything stored had settled the processor did other things, in one arm
                    # for seconds, in another not at all: a first hit makes them alike again.
                    self._prepare(cell, flush, 0.0)
                    self._timed(tokens, sampling)
                if cell != "after_store":
                    self._prepare(cell, flush, burn)
                    before = self._counts()
                seen[cell] = self._timed(tokens, sampling)
                if following != "after_store":
                    seen[cell]["counts"] = _difference(self._counts(), before)
            seen["settle_s"] = self.settle(flush)
        finally:
            gc.enable()
        return seen

    def phase(
        self, seed: int, length: int, cell: str, max_tokens: int, logprobs: int
    ) -> dict[str, Any]:
        """Answer a prompt from where `cell` says, and tell what the store did for it."""
        self._prepare(cell, flush=True, burn=0.0)
        self._call("bench_events")
        before = self._call("bench_cache_stats")
        answer = self.ask(tokens_of(seed, length, self.vocabulary), max_tokens, logprobs)
        answer["core"] = _difference(self._call("bench_cache_stats"), before)
        answer["events"] = [event for event in self._call("bench_events") if event["op"] in LOADING]
        self.settle()
        return answer

    def chat_turn(self, seed: int, length: int, whole: int, flush: bool = True) -> dict[str, Any]:
        """Ask with the first `length` tokens of a prompt of `whole` tokens, and let it settle."""
        seen = self.ask(tokens_of(seed, whole, self.vocabulary)[:length])
        self.settle(flush)
        return seen

    def _prepare(self, cell: str, flush: bool, burn: float) -> None:
        self.settle(flush)
        # Arms that share an engine share the GPU's prefix cache too.
        if cell != "gpu_hit":
            self.reset()
        if cell == "cold_tier":
            self._call("bench_clear_memory")
        if cell in {"disk_hit", "cold_tier"}:
            for folder in self.spec.get("dropped", {}).get(self.active or "", ()):
                drop_page_cache(folder)
        self._call("bench_burn", burn)

    def link(self, nbytes: int, repeats: int = 5) -> dict[str, float]:
        """Bandwidth between host and device, in the engine's own process."""
        return self._call("bench_link", nbytes, repeats)

    def burn(self, seconds: float = BURN_SECONDS) -> None:
        """Bring the GPU's clocks up."""
        self._call("bench_burn", seconds)

    def time_calls(self, on: bool) -> dict[str, Any]:
        """Time the connector's own calls, or stop and tell."""
        return self._call("bench_time_calls", on)

    def counters(self) -> dict[str, Any]:
        """What LakeCache counted since the start, and what its load policy has learned."""
        return {
            "scheduler": self._call("bench_counters"),
            "core": self._call("bench_cache_stats"),
            "estimates": self._call("bench_estimates"),
        }

    def folder_bytes(self, folder: str) -> int:
        """Bytes of all files below a folder."""
        return folder_bytes(folder)

    def decode(
        self, streams: int, tokens: int, prompt: int, seed: int, intruders: list[int],
        length: int, at: int,
    ) -> dict[str, Any]:  # fmt: skip
        """Decode `streams` requests; after `at` steps send prompts (by seed) that arrive at once.

        Returns the gaps between outputs of each stream in ms, from that step on, and when the
        prompts were answered.
        """
        engine = self.llm.llm_engine
        last: dict[str, float] = {}
        gaps: list[float] = []
        answered: list[float] = []
        waiting = [tokens_of(one, length, self.vocabulary) for one in intruders]
        before = self._counts()
        self._call("bench_collect")
        gc.collect()
        gc.disable()
        try:
            for stream in range(streams):
                self._add(engine, tokens_of(seed + stream, prompt, self.vocabulary), tokens, "s")
            steps, sent, arrived = 0, False, 0.0
            while engine.has_unfinished_requests():
                if steps == at and not sent:
                    arrived, sent = time.perf_counter(), True
                    for one in waiting:
                        self._add(engine, one, 1, "i")
                outputs = engine.step()
                now = time.perf_counter()
                grown = [output for output in outputs if output.request_id[0] == "s"]
                answered += [
                    (now - arrived) * 1e3
                    for output in outputs
                    if output.request_id[0] == "i" and output.finished
                ]
                steps += len(grown) == streams
                for output in grown:
                    previous = last.get(output.request_id)
                    if previous is not None and sent:
                        gaps.append((now - previous) * 1e3)
                    last[output.request_id] = now
        finally:
            gc.enable()
        counts = _difference(self._counts(), before)
        return {"gaps": gaps, "answered_ms": answered, "counts": counts}

    def _add(self, engine: Any, tokens: list[int], count: int, kind: str) -> None:
        self.request_number += 1
        sampling = self.sampling(
            temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False
        )
        engine.add_request(f"{kind}{self.request_number}", {"prompt_token_ids": tokens}, sampling)

    def answers(
        self, prompts: list[list[int]], max_tokens: int, logprobs: int | None
    ) -> list[dict[str, Any]]:
        """Send prompts one after the other and return what was answered."""
        return [self.ask(tokens, max_tokens, logprobs) for tokens in prompts]

    def together(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Send all prompts at once and return their tokens."""
        sampling = self.sampling(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        outputs = self.llm.generate(
            [{"prompt_token_ids": tokens} for tokens in prompts], sampling, use_tqdm=False
        )
        return [list(output.outputs[0].token_ids) for output in outputs]

    def abort_after(self, prompts: list[list[int]], steps: int) -> int:
        """Send all prompts, abort every second after some steps, finish the rest."""
        engine = self.llm.llm_engine
        first = self.request_number
        for tokens in prompts:
            self._add(engine, tokens, 16, "a")
        for _ in range(steps):
            engine.step()
        aborted = [f"a{first + 1 + number}" for number in range(0, len(prompts), 2)]
        engine.abort_request(aborted)
        finished = 0
        while engine.has_unfinished_requests():
            finished += sum(output.finished for output in engine.step())
        return finished

    def quit(self) -> None:
        """Let every arm finish, then end the engine."""
        with contextlib.suppress(Exception):
            self.settle()
        if self.switched:
            self._call("bench_activate", "*")
        self.llm.llm_engine.engine_core.shutdown()


def die_with_parent(parent: int) -> None:
    """End the whole process group once the bench is gone, however it went."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def main() -> int:
    threading.Thread(target=die_with_parent, args=(os.getppid(),), daemon=True).start()
    spec = json.loads(Path(sys.argv[1]).read_text())
    commands = os.fdopen(int(sys.argv[2]), "r")
    answers = os.fdopen(int(sys.argv[3]), "w")

    def answer(**what: Any) -> None:
        answers.write(json.dumps(what) + "\n")
        answers.flush()

    try:
        host = EngineHost(spec)
        answer(ok=host.started())
    except BaseException as error:
        answer(error="".join(traceback.format_exception_only(error)).strip())
        raise
    for line in commands:
        command = json.loads(line)
        try:
            result = getattr(host, command["method"])(**command["with"])
        except Exception as error:
            traceback.print_exc()
            answer(error="".join(traceback.format_exception_only(error)).strip())
            continue
        answer(ok=result)
        if command["method"] == "quit":
            break
    return 0


if __name__ == "__main__":
    sys.exit(main())
