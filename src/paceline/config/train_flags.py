"""The settings that have a flag of their own; `--set KEY=VALUE` and `--config FILE` set all of them."""

FLAGS = {
    "algo": "--algo",
    "env.id": "--env",
    "stop.total_steps": "--total-steps",
    "stop.iterations": "--iterations",
    "stop.max_time": "--max-time",
    "stop.return_mean": "--stop-return",
    "engine.workers": "--workers",
    "env.envs_per_worker": "--envs-per-worker",
    "engine.name": "--engine",
    "engine.device": "--device",
    "engine.threads": "--threads",
    "seed": "--seed",
    "out": "--out",
    "name": "--name",
}
