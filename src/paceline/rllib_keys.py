"""Which of our settings RLlib takes. Every key of the config is in one of three tables; a test holds that.

`engine/rllib_settings.py` does what MAPPED says. A key of REFUSED stays at its default, or KEY=VALUE has another
value: else the run ends before it begins, and a preset leaves it out.
"""

from __future__ import annotations

MAPPED: dict[str, str] = {
    "algo": "`PPO`; `IMPALA`, or `APPO` with `impala.surrogate_clip`; `DQN`; `SAC`",
    "seed": "`seed`",
    "env.id": "the environment, with its wrappers, as everywhere; it travels to the env runners",
    "env.kwargs": "of the environment",
    "env.wrappers": "of the environment",
    "env.max_episode_steps": "of the environment",
    "env.frame_stack": "of the environment",
    "env.vector": "`gym_env_vectorize_mode`: `sync` or `async` (a process for each environment)",
    "env.envs_per_worker": "`num_envs_per_env_runner`",
    "model.cnn": "`conv_filters`, the same over images; not `impala`",
    "model.hidden": "`fcnet_hiddens`, for images `head_fcnet_hiddens`; of SAC those of actor and critics",
    "model.activation": "`fcnet_activation`, `head_fcnet_activation`",
    "model.shared": "`vf_share_layers`; for images the layers in common are convolutions, too, and need `relu`",
    "ppo.rollout_steps": "`train_batch_size_per_learner`: times the environments, over the learners",
    "ppo.epochs": "`num_epochs`",
    "ppo.minibatch_size": "`minibatch_size`: over the learners",
    "ppo.learning_rate": "`lr`",
    "ppo.learning_rate_schedule": "`lr` as a schedule; needs a budget in steps or iterations",
    "ppo.gamma": "`gamma`",
    "ppo.gae_lambda": "`lambda_`",
    "ppo.clip": "`clip_param`",
    "ppo.entropy_coef": "`entropy_coeff`",
    "ppo.value_coef": "`vf_loss_coeff`",
    "ppo.max_grad_norm": "`grad_clip` by global norm; 0: none",
    "impala.rollout_steps": "`rollout_fragment_length`",
    "impala.batch_size": "`train_batch_size_per_learner`: over the learners",
    "impala.learning_rate": "`lr`",
    "impala.learning_rate_schedule": "`lr` as a schedule; needs a budget in steps",
    "impala.gamma": "`gamma`",
    "impala.entropy_coef": "`entropy_coeff`",
    "impala.value_coef": "`vf_loss_coeff`: twice as much, as RLlib halves the squared error",
    "impala.max_grad_norm": "`grad_clip` by global norm; 0: none",
    "impala.clip_rho": "`vtrace_clip_rho_threshold`",
    "impala.clip_pg_rho": "`vtrace_clip_pg_rho_threshold`",
    "impala.surrogate_clip": "`APPO` with this `clip_param`",
    "dqn.rollout_steps": "`rollout_fragment_length`: steps of each environment between updates",
    "dqn.rounds": "`min_sample_timesteps_per_iteration`: that many rounds of these",
    "dqn.gradient_steps": "`training_intensity`: so that there are as many",
    "dqn.batch_size": "`train_batch_size_per_learner`: over the learners",
    "dqn.learning_rate": "`lr`",
    "dqn.learning_rate_schedule": "`lr` as a schedule; needs a budget in steps",
    "dqn.gamma": "`gamma`",
    "dqn.max_grad_norm": "`grad_clip` by global norm; 0: none",
    "dqn.replay_size": "`replay_buffer_config.capacity`",
    "dqn.learning_starts": "`num_steps_sampled_before_learning_starts`",
    "dqn.double": "`double_q`",
    "dqn.dueling": "`dueling`; but for images its layers are shared, so `model.shared=true` belongs to it",
    "dqn.n_step": "`n_step`; at most `dqn.rollout_steps`",
    "dqn.prioritized": "`replay_buffer_config.type`",
    "dqn.priority_alpha": "`replay_buffer_config.alpha`",
    "dqn.priority_beta": "`replay_buffer_config.beta`, which stays as it is",
    "dqn.epsilon_start": "`epsilon`",
    "dqn.epsilon_end": "`epsilon`",
    "dqn.epsilon_fraction": "`epsilon`; needs a budget in steps",
    "dqn.target_update_every": "`target_network_update_freq`, in steps of the environments",
    "dqn.target_tau": "`tau`",
    "sac.learning_rate": "`actor_lr`, `critic_lr` and `alpha_lr`",
    "sac.gamma": "`gamma`",
    "sac.batch_size": "`train_batch_size_per_learner`: over the learners",
    "sac.buffer_size": "`replay_buffer_config.capacity`",
    "sac.learning_starts": "`num_steps_sampled_before_learning_starts`",
    "sac.tau": "`tau`",
    "sac.n_step": "`n_step`",
    "engine.workers": "`num_env_runners`",
    "engine.learners": "`num_learners`; one learns in our own process, of IMPALA and APPO in one of its own",
    "engine.device": "`cuda`, or `auto` with a GPU here and images: `num_gpus_per_learner` = 1",
    "engine.scaling": "`weak`: as many environments and rows for each env runner",
    "engine.learning_rate_scaling": "multiplies `lr`",
    "engine.max_restarts": "`max_num_env_runner_restarts`",
    "engine.rllib": "as it is, and last",
}

OURS = frozenset(
    {"preset", "out", "name", "engine.name", "engine.address", "engine.dashboard", "engine.threads"}
    | {"engine.start_timeout_seconds"}
    | {f"stop.{key}" for key in ("total_steps", "iterations", "max_time", "metric", "return_mean", "return_window")}
    | {"stop.confirm_episodes", "eval.every_steps", "eval.episodes", "eval.stochastic"}
    | {f"checkpoint.{key}" for key in ("every_iterations", "every_seconds", "keep")}
)
"""The loop and the Ray cluster see to them, whatever the engine."""

_OWN = "RLlib builds its own network"
_VTRACE = "RLlib's V-trace has no such setting"
REFUSED: dict[str, str] = {
    "env.processes": "env.vector=async has a process for each environment",
    "env.step_timeout_seconds": "RLlib limits a whole sample: engine.rllib.sample_timeout_s",
    "env.normalize_observation": "use a wrapper, such as NormalizeObservation",
    "env.normalize_reward": "use a wrapper, such as NormalizeReward; reported returns are then scaled too",
    "env.clip_reward": "use a wrapper, such as ClipReward; reported returns are then clipped too",
    "env.reward_discount": "it belongs to env.normalize_reward",
    "model.cnn=impala": "RLlib's own networks have no residual blocks; nature and small are the same there",
    "model.cnn_width": "it belongs to model.cnn=impala",
    "model.cnn_pool": "it belongs to model.cnn=impala",
    "model.class": _OWN,
    "model.kwargs": _OWN,
    "model.squash": "of its algorithms SAC squashes actions, always, and the others clip them",
    "model.log_std_init": "it begins with 0",
    "ppo.normalize_advantage": "RLlib's PPO always does",
    "ppo.clip_schedule": "its clip_param is constant",
    "ppo.value_clip": "its vf_clip_param bounds the loss of the value instead: engine.rllib.vf_clip_param",
    "ppo.target_kl": "it adds a KL term to the loss instead: engine.rllib.kl_target and kl_coeff",
    "impala.optimizer": "RLlib's learners use Adam",
    "impala.normalize_advantage": _VTRACE,
    "impala.trace_lambda": _VTRACE,
    "impala.clip_c": _VTRACE,
    "impala.replay_ratio": "of APPO see engine.rllib.circular_buffer_iterations_per_batch",
    "impala.replay_batches": "of APPO see engine.rllib.circular_buffer_num_batches",
    "dqn.huber": "RLlib's is 1; engine.rllib.td_error_loss_fn takes mse",
    "dqn.replay": "its replay is in memory",
    "dqn.exploration": "its noisy networks are not ours, and our copy of the policy would not be the same",
    "dqn.epsilon_power": "all its env runners explore alike",
    "dqn.noisy_deviation": "it belongs to dqn.exploration=noisy",
    "engine.compile": "see engine.rllib.torch_compile_learner",
    "engine.overlap": "impala overlaps by itself",
    "engine.straggler_share": "RLlib waits for all env runners; see engine.rllib.sample_timeout_s",
}
"""Each with what to do, or why there is nothing."""
