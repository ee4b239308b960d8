"""LakeCache's connector in an engine that speculates on a CPU, to rehearse the GPU tests there."""

import mtp_model
from lakecache.connector import LakeCacheConnector

__all__ = ["LakeCacheConnector"]

mtp_model.run_on_cpu()
