"""Treadle turns an LLM agent's history into its next, better and cheaper, version."""

__version__ = "0.1.0"
