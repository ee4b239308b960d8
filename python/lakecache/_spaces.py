"""The namespaces of an engine: what goes into every key besides the tokens."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from lakecache import identity
from lakecache._records import Space

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

__all__ = ["Namespaces"]


MEMORY_ONLY = b"lakecache: what never reaches the disk"


class Namespaces:
    """One namespace for the model alone, and one for each LoRA adapter.

    They are known once the ranks have described their pages and the files have been read, which
    happens in the background.
    """

    def __init__(
        self, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, cache: Any, *, chunk: int,
        counts: Counter[str], unstable: str | None,
    ) -> None:  # fmt: skip
        """Begin to read the weights; `unstable` says why keys must not outlive this process."""
        from lakecache import _core

        self._core = _core
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._cache = cache
        self._chunk = chunk
        self._counts = counts
        self._unstable = unstable
        # What the ranks say about their pages; None until they have, or where they disagree.
        self.ranks: list[str] | None = None
        # Called with the name of the model's namespace.
        self.when_known: Callable[[str], None] | None = None
        self._fingerprint = None if unstable else identity.Fingerprint(vllm_config)
        self._known: dict[tuple[str, int, str] | None, Space | None] = {}
        self._lora_digests: dict[tuple[str, int, str], identity.LoraDigest] = {}
        self._adapters: dict[tuple[str, str], int] = {}
        self._base_digest: bytes | None = None
        self._manifest = ""

    def wait(self, timeout: float) -> None:
        """Wait for the weights' digest."""
        if self._fingerprint is not None:
            self._fingerprint.wait(timeout)

    def reset(self) -> None:
        """Begin namespaces that share nothing with those before."""
        self._known.clear()
        self._lora_digests.clear()
        self._base_digest = None
        self._unstable = "the cache was reset"

    def of(self, lora: Any) -> Space | None:
        """Give the namespace for a request with this adapter, or None while it is not known."""
        place = None if lora is None else (lora.lora_name, lora.lora_int_id, lora.lora_path)
        if place is not None and not self._keeps_content(lora):
            return None
        found = self._known.get(place)
        if found is not None:
            return found
        base = self._digest()
        if base is None:
            return None
        digest, manifest = base, self._manifest
        if place is not None:
            adapter = self._lora_digests.get(place)
            if adapter is None:
                adapter = self._lora_digests[place] = identity.LoraDigest(place[2])
            if (files := adapter.poll()) is None:
                return None
            digest = self._core.blake3(base + files.encode())
            manifest = manifest[:-1] + f',"lora":"{files}"}}'
        # A pool has a thousand numbers and takes none back: what only this process can find, by
        # keys that are random, shares one.
        named = self._core.blake3(MEMORY_ONLY) if self._unstable else digest
        number = self._cache.namespace(named, manifest, persistent=not self._unstable)
        if number is None:
            self._counts["namespace_full"] += 1
            return None
        self._known[place] = Space(digest, number)
        return self._known[place]

    def _keeps_content(self, lora: Any) -> bool:
        """Whether this adapter was loaded from its path only once in this engine.

        After a second time, vLLM's own prefix cache may hold blocks of the first content.
        """
        path = (lora.lora_name, lora.lora_path)
        ident = 0 if lora.load_inplace else lora.lora_int_id
        if self._adapters.setdefault(path, ident) != ident:
            self._adapters[path] = 0
        return self._adapters[path] != 0

    def _digest(self) -> bytes | None:
        if self._base_digest is not None:
            return self._base_digest
        if self.ranks is None:
            return None
        weights = "" if self._fingerprint is None else self._fingerprint.poll()
        if weights is None:
            return None
        whole = identity.engine_identity(
            self._vllm_config, self._kv_cache_config, chunk_tokens=self._chunk
        )
        whole["weights"] = weights
        whole["ranks"] = self.ranks
        if self._unstable:
            whole["only_this_process"] = os.urandom(16).hex()
        text = identity.canonical_json(whole)
        self._manifest = text.decode()
        self._base_digest = self._core.blake3(text)
        if self.when_known is not None:
            self.when_known(self._base_digest.hex())
        return self._base_digest
