"""`python -m lakecache`: the command line where its script is not on the path."""

from __future__ import annotations

import sys

from lakecache.cli import main

sys.exit(main())
