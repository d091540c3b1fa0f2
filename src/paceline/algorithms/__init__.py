"""The algorithms, one file each: settings, loss and schedule. `config/algorithms.py` lists them."""

from paceline.algorithms.base import Algorithm, Loss, Metrics
from paceline.algorithms.on_policy import OnPolicy, OnPolicySettings
from paceline.algorithms.rows import LossRows, Rows

__all__ = ["Algorithm", "Loss", "LossRows", "Metrics", "OnPolicy", "OnPolicySettings", "Rows"]
