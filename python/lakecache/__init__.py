"""LakeCache: a KV cache for vLLM that outlives GPU memory, first in shared memory, then on disk.

Importing this package imports nothing heavy: no torch, no vLLM, no compiled code. vLLM imports
`lakecache.connector` in its front end, in the engine core and in every worker.
"""

from __future__ import annotations
