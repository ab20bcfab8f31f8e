"""Plays rollouts of Python environments for the orchestrator over `prl-env/1` (docs/developers/env-protocol.md).

Standard library only; the environment's own library comes with its virtual environment.
"""

__version__ = "1.0.0"
PROTOCOL = 1
