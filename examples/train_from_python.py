"""Training and using agents from Python: three seeds, then one episode with the best of them.

python examples/train_from_python.py
"""

from __future__ import annotations

import paceline


def main() -> None:
    runs = [
        paceline.train({"env": "CartPole-v1", "seed": seed, "eval": {"every_steps": 20_000}, "name": f"seed-{seed}"})
        for seed in range(3)
    ]
    for run in runs:
        summary = run.summary
        print(f"{run.path}: {summary['env_steps']:,} steps, return {summary['return_mean']:.1f}")

    best = max(runs, key=lambda run: run.summary["best_return"] or 0.0)
    agent = paceline.load(best)
    env = agent.make_env()
    observation, _ = env.reset(seed=1)
    total, ended = 0.0, False
    while not ended:
        observation, reward, terminated, truncated, _ = env.step(agent.act(observation))
        total, ended = total + float(reward), terminated or truncated
    print(f"an episode of {best.path}: return {total:.0f}")


if __name__ == "__main__":
    main()
