"""Level 3 for many networks: `ol.sweep` trains a grid of candidates together."""

from onelaunch.sweep.ranking import Row
from onelaunch.sweep.result import Sweep
from onelaunch.sweep.sweep import sweep

__all__ = ["Row", "Sweep", "sweep"]
