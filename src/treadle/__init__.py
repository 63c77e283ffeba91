"""Treadle turns an LLM agent's history into its next, better and cheaper, version."""

import os

# MKL's results may depend on where arrays happen to lie; this mode's do not. It is read once, when torch is loaded.
os.environ.setdefault("MKL_CBWR", "AUTO")

__version__ = "0.1.0"
