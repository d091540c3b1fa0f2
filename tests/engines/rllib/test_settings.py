"""Every setting is mapped, refused or used by paceline itself; mapped ones arrive at RLlib. Does not need ray."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import ALGORITHMS, RunConfig, UserError, algorithm_class, rllib_keys
from paceline.config.resolve import keys, put, resolve_tree, to_tree, validate
from paceline.engines.rllib import settings as rllib_settings

RLLIB = [name for name in ALGORITHMS if algorithm_class(name).rllib is not None]

ENGINE = {"name": "rllib"}
# Another value than the default for each key that is mapped, or (algorithm, value).
OTHER: dict[str, Any] = {
    "algo": "impala",
    "seed": 5,
    "env.vector": "async",
    "env.envs_per_worker": 3,
    "model.hidden": [7],
    "model.activation": "relu",
    "model.shared": True,
    "ppo.rollout_steps": 64,
    "ppo.epochs": 3,
    "ppo.minibatch_size": 32,
    "ppo.learning_rate": 1e-3,
    "ppo.learning_rate_schedule": "linear",
    "ppo.gamma": 0.9,
    "ppo.gae_lambda": 0.5,
    "ppo.clip": 0.1,
    "ppo.entropy_coef": 0.01,
    "ppo.value_coef": 0.25,
    "ppo.max_grad_norm": 0,
    "impala.rollout_steps": 10,
    "impala.batch_size": 100,
    "impala.learning_rate": 1e-3,
    "impala.learning_rate_schedule": "linear",
    "impala.gamma": 0.9,
    "impala.entropy_coef": 0.01,
    "impala.value_coef": 0.25,
    "impala.max_grad_norm": 1.0,
    "impala.clip_rho": 2.0,
    "impala.clip_pg_rho": 2.0,
    "impala.surrogate_clip": 0.2,
    "dqn.rollout_steps": 8,
    "dqn.rounds": 2,
    "dqn.gradient_steps": 2,
    "dqn.batch_size": 32,
    "dqn.learning_rate": 1e-4,
    "dqn.learning_rate_schedule": "linear",
    "dqn.gamma": 0.9,
    "dqn.max_grad_norm": 1.0,
    "dqn.replay_size": 1000,
    "dqn.learning_starts": 10,
    "dqn.double": False,
    "dqn.dueling": True,
    "dqn.n_step": 3,
    "dqn.prioritized": True,
    "dqn.priority_alpha": 0.5,
    "dqn.priority_beta": 0.5,
    "dqn.epsilon_start": 0.5,
    "dqn.epsilon_end": 0.01,
    "dqn.epsilon_fraction": 0.5,
    "dqn.target_update_every": 10,
    "dqn.target_tau": 0.5,
    "sac.rollout_steps": 2,
    "sac.rounds": 7,
    "sac.updates_per_step": 0.5,
    "sac.learning_rate": 1e-3,
    "sac.learning_rate_schedule": "linear",
    "sac.max_grad_norm": 2.0,
    "sac.gamma": 0.9,
    "sac.batch_size": 64,
    "sac.buffer_size": 1000,
    "sac.learning_starts": 100,
    "sac.tau": 0.1,
    "sac.n_step": 3,
    "sac.temperature_start": 0.5,
    "sac.target_entropy": -3.0,
    "engine.workers": 5,
    "engine.learners": 2,
    "engine.device": "cuda",
    "engine.scaling": "weak",
    "engine.learning_rate_scaling": "linear",
    "engine.max_restarts": 2,
    "engine.rllib": {"vf_clip_param": 7.0},
}
OF_THE_NETWORK = {"model.cnn"}
OF_THE_AGENTS = {"multi_agent.policies", "multi_agent.frozen"}  # see test_agents.py
OF_THE_ENV = {"env.id", "env.kwargs", "env.wrappers", "env.max_episode_steps", "env.frame_stack", "env.channels"}
OF_THE_ENV |= {"env.normalize_observation", "env.normalize_reward", "env.reward_discount"}


def config_of(tree: dict[str, Any]) -> RunConfig:
    return validate({"engine": ENGINE, "stop": {"total_steps": 10_000}} | tree)


def plan(config: RunConfig) -> Any:
    workers = rllib_settings.workers_of(config, 4)
    settings = rllib_settings.settings_of(config, workers, seed=config.seed)
    rllib_settings.override(settings, config.engine.rllib, {"vf_clip_param": "training"})
    return rllib_settings.algorithm_of(config), settings, rllib_settings.model_of(config, None, continuous=False)


def test_every_key_is_in_one_table() -> None:
    own = {key for key, *_ in keys() if key.partition(".")[0] not in set(ALGORITHMS) - set(RLLIB)}
    refused = {key for key in rllib_keys.REFUSED if "=" not in key}  # of others a value alone is
    tables = [set(rllib_keys.MAPPED), set(rllib_keys.OURS), refused]
    assert sum(len(table) for table in tables) == len(set.union(*tables))
    assert set.union(*tables) == own
    assert set(OTHER) | OF_THE_ENV | OF_THE_NETWORK | OF_THE_AGENTS == set(rllib_keys.MAPPED)


@pytest.mark.parametrize("key", OTHER)
def test_a_mapped_key_arrives(key: str) -> None:
    section = key.partition(".")[0]
    tree: dict[str, Any] = {"algo": section if section in RLLIB else "ppo", "engine": dict(ENGINE)}
    if key == "engine.learning_rate_scaling":
        tree["engine"] |= {"scaling": "weak", "workers": 2}
    if key == "dqn.dueling":
        tree["model"] = {"shared": True}
    if key.startswith("dqn.priority"):
        tree["dqn"] = {"prioritized": True}
    before = plan(config_of(tree))
    put(tree, key, OTHER[key])
    after = config_of(tree)
    rllib_settings.check(after)
    assert plan(after) != before


REFUSED = {
    "env.processes": 2,
    "env.restart_on_error": 3,
    "env.step_timeout_seconds": 5,
    "env.clip_reward": True,
    "model.cnn=impala": "impala",
    "model.cnn_width": 2,
    "model.cnn_pool": True,
    "model.memory": "lstm",
    "model.memory_size": 32,
    "model.sequence_length": 32,
    "model.class": "nets.py:Net",
    "model.kwargs": {"a": 1},
    "model.accelerate": False,
    "model.squash": True,
    "model.log_std_init": -1.0,
    "ppo.normalize_advantage": False,
    "ppo.clip_schedule": "linear",
    "ppo.value_clip": 0.2,
    "ppo.target_kl": 0.01,
    "impala.optimizer": "rmsprop",
    "impala.normalize_advantage": True,
    "impala.trace_lambda": 0.9,
    "impala.clip_c": 2.0,
    "impala.replay_ratio": 1.0,
    "impala.replay_batches": 4,
    "dqn.huber": 2.0,
    "dqn.replay": "disk",
    "sac.replay": "disk",
    "sac.temperature": 0.2,
    "dqn.exploration": "noisy",
    "dqn.epsilon_power": 3.0,
    "dqn.noisy_deviation": 0.1,
    "engine.compile": True,
    "engine.overlap": True,
    "engine.straggler_share": 0.5,
}
NEEDS = {"model.cnn_width": ("model.cnn", "impala"), "model.cnn_pool": ("model.cnn", "impala")}
NEEDS["model.kwargs"] = ("model.class", "nets.py:Net")
NEEDS |= dict.fromkeys(("model.memory_size", "model.sequence_length"), ("model.memory", "lstm"))


def test_the_refused_are_all_tried() -> None:
    assert set(REFUSED) == set(rllib_keys.REFUSED)


@pytest.mark.parametrize("key", REFUSED)
def test_a_refused_key_is_named(key: str) -> None:
    section = key.partition(".")[0]
    tree: dict[str, Any] = {"algo": section if section in RLLIB else "ppo"}
    if key in NEEDS:
        put(tree, *NEEDS[key])
    put(tree, key.partition("=")[0], REFUSED[key])
    named = NEEDS.get(key, (key.partition("=")[0],))[0]  # the one that comes first
    with pytest.raises(UserError, match=rf"^{named}=.* is not supported by --engine rllib: "):
        rllib_settings.check(config_of(tree | {"engine": ENGINE | tree.get("engine", {})}))


def test_a_preset_fills_only_what_can_be_mapped() -> None:
    tree = {"algo": "impala", "env": "Acrobot-v1"}
    ours, name = resolve_tree(tree)
    theirs, same = resolve_tree(tree | {"engine": ENGINE})
    assert name == same == "impala/Acrobot-v1"
    assert ours.env.normalize_reward and theirs.env.normalize_reward
    assert theirs.hyper == ours.hyper and theirs.env.envs_per_worker == ours.env.envs_per_worker
    rllib_settings.check(theirs)
    pictures, _ = resolve_tree({"preset": "procgen-paper", "engine": ENGINE})
    assert pictures.model.cnn == "auto" and pictures.model.hidden == [256] and pictures.model.shared
    game = {"algo": "impala", "env": "ALE/Pong-v5"}
    assert resolve_tree(game)[0].env.clip_reward and not resolve_tree(game | {"engine": ENGINE})[0].env.clip_reward
    with pytest.raises(UserError, match=r"^env.clip_reward=true is not supported by --engine rllib"):
        explicit = {"env": {"id": "Acrobot-v1", "clip_reward": True}, "engine": ENGINE, "algo": "impala"}
        rllib_settings.check(resolve_tree(explicit)[0])


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (
            {"algo": "a2c", "engine": ENGINE},
            "algo=a2c is not available on --engine rllib, which has ppo, impala, dqn, sac: leave --engine out",
        ),
    ],
)
def test_an_algorithm_has_its_engines(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=f"^{message}"):
        resolve_tree(tree)


def test_batches_are_shared_by_workers_and_learners() -> None:
    tree = {"env": {"envs_per_worker": 8}, "ppo": {"rollout_steps": 100, "minibatch_size": 200}}
    strong = plan(config_of(tree | {"engine": ENGINE | {"workers": 4, "learners": 2}}))[1]
    assert strong["env_runners"]["num_envs_per_env_runner"] == 2
    assert strong["training"]["train_batch_size_per_learner"] == 400
    assert strong["training"]["minibatch_size"] == 100
    weak = plan(config_of(tree | {"engine": ENGINE | {"workers": 4, "scaling": "weak"}}))[1]
    assert weak["env_runners"]["num_envs_per_env_runner"] == 8
    assert weak["training"]["train_batch_size_per_learner"] == 3200


def test_a_schedule_needs_steps() -> None:
    tree = {"ppo": {"learning_rate_schedule": "linear", "rollout_steps": 10}, "env": {"envs_per_worker": 2}}
    assert plan(config_of(tree | {"stop": {"iterations": 5}}))[1]["training"]["lr"] == [[0, 3e-4], [100, 0.0]]
    with pytest.raises(UserError, match=r"^ppo.learning_rate_schedule=linear"):
        plan(config_of(tree | {"stop": {"max_time": 60}}))


def test_what_rllib_does_not_know_is_refused() -> None:
    with pytest.raises(UserError, match=r"^engine.rllib.vf_clip: .* did you mean vf_clip_param\?"):
        rllib_settings.override({}, {"vf_clip": 1}, {"vf_clip_param": "training"})


def test_what_is_ours_is_not_set_twice() -> None:
    with pytest.raises(UserError, match=r"^engine.rllib.num_env_runners is set by --workers"):
        rllib_settings.override({}, {"num_env_runners": 4}, {"num_env_runners": "env_runners"})


def test_epsilon_falls_with_the_steps() -> None:
    config = config_of({"algo": "dqn", "dqn": {"epsilon_start": 1.0, "epsilon_end": 0.5, "epsilon_fraction": 0.1}})
    assert [rllib_settings.epsilon_at(config, steps) for steps in (0, 500, 1000, 5000)] == [1.0, 0.75, 0.5, 0.5]


@pytest.mark.parametrize(
    ("tree", "key"),
    [
        ({"model": {"hidden": []}}, "model.hidden"),
        ({"algo": "sac", "model": {"shared": True}}, "model.shared"),
        ({"algo": "dqn", "dqn": {"n_step": 5}}, "dqn.n_step"),
        ({"engine": ENGINE | {"learners": 3}}, "ppo.minibatch_size"),
    ],
)
def test_what_does_not_go_together(tree: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=f"^{key}="):
        rllib_settings.check(config_of(tree))


def test_cpus_that_ray_is_asked_for() -> None:
    assert (
        rllib_settings.cpus_of(config_of({"engine": ENGINE | {"learners": 1}}), 3) == 3
    )  # the learner is in our process
    assert rllib_settings.cpus_of(config_of({"algo": "impala"}), 3) == 4
    shares = ENGINE | {"learners": 2, "rllib": {"num_cpus_per_env_runner": 0.5}}
    assert rllib_settings.cpus_of(config_of({"engine": shares}), 3) == 3.5


def test_the_config_survives_its_file() -> None:
    config = config_of({"algo": "sac", "sac": {"tau": 0.1}, "engine": ENGINE | {"rllib": {"grad_clip": 1.0}}})
    assert validate(to_tree(config)) == config
