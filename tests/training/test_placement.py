from __future__ import annotations

import pytest

from paceline.config import RunConfig
from paceline.config.resolve import validate
from paceline.training.placement import choose_engine, cluster_address


def test_local_is_not_the_address_of_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    config = RunConfig()
    assert cluster_address(config.engine) is None and choose_engine(config) == "local"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_address(config.engine) == "10.0.0.1:6379" and choose_engine(config) == "ray"


def test_auto_is_ray_for_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert choose_engine(validate({"engine": {"workers": 2}})) == "ray"
    assert choose_engine(validate({"algo": "impala", "engine": {"learners": 2}})) == "ray"
    assert choose_engine(validate({"engine": {"workers": 1}})) == "local"
    assert choose_engine(validate({"engine": {"name": "rllib"}})) == "rllib"
