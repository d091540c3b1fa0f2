"""DQN compared with Stable-Baselines3, and the cost of a replay on disk.

Peer and paceline run in turns, as in ppo.py. Both use plain DQN, because Stable-Baselines3 has no double DQN. The
replay on disk is compared with the same replay in memory, each in its own process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from measuring import ROOT, output_of
from ppo import JOBS, Bench, Job, say
from tables import Row

_CARTPOLE = (
    "--preset none --algo dqn --env CartPole-v1 --set dqn.double=false --set model.hidden=[256,256] "
    "--set model.activation=relu --set dqn.batch_size=64 --set dqn.replay_size=100000 --set dqn.learning_starts=1000"
)
# Stable-Baselines3 updates the target every 10 env steps, which is once per round of 128 optimizer steps. A single
# environment is stepped directly on both sides; CartPole's vector env is for several.
_ZOO = (
    "--envs-per-worker 1 --set env.vector=sync --set dqn.rollout_steps=256 --set dqn.rounds=1 "
    "--set dqn.gradient_steps=128 --set dqn.learning_rate=2.3e-3 --set dqn.gamma=0.99 "
    "--set dqn.target_update_every=128 --set dqn.epsilon_fraction=0.16 --set dqn.epsilon_end=0.04"
)
_WIDE = (
    "--envs-per-worker 8 --set dqn.rollout_steps=4 --set dqn.gradient_steps=1 --set dqn.learning_rate=1e-3 "
    "--set dqn.target_update_every=31"
)
JOBS |= {
    "dqn zoo": Job(
        peer="peer_sb3_dqn.py zoo --steps {size}",
        ours=f"{_CARTPOLE} {_ZOO} --total-steps {{size}}",
        size=50_000,
        quick_size=5_000,
        seeds=5,
    ),
    "dqn throughput": Job(
        peer="peer_sb3_dqn.py throughput --steps {size}",
        ours=f"{_CARTPOLE} {_WIDE} --total-steps {{size}}",
        size=200_000,
        quick_size=20_000,
        seeds=5,
    ),
}
DRAWS, ROWS = 200, 256
ANON_LIMIT_MB = 1000


def zoo(bench: Bench) -> list[Row]:
    return [_speed(bench, "dqn zoo", "training, s")]


def throughput(bench: Bench) -> list[Row]:
    return [_speed(bench, "dqn throughput", "env steps/s")]


def _speed(bench: Bench, name: str, measure: str) -> Row:
    """Without the arithmetic floor, which is computed for PPO."""
    pairs = bench.pairs(name)
    row = bench.speed(name, 3, pairs, measure)
    return Row(**{**vars(row), "floor_seconds": None})


def replay(bench: Bench) -> list[Row]:
    """A million observations of 64 x 64 x 3 bytes: the time to draw 256 rows, and the anonymous memory."""
    rows = 100_000 if bench.quick else 1_000_000
    seconds: dict[str, list[float]] = {"ram": [], "disk": []}
    anonymous = []
    for _ in range(bench.repeats):
        for where, found in seconds.items():
            words = [sys.executable, __file__, "--measure", where, "--rows", str(rows)]
            record = json.loads(output_of(words, 900).splitlines()[-1])
            found.append(1000 * record["seconds"])
            say(f"replay, {where}: {found[-1]:.2f} ms, {record['anonymous_mb']:.0f} MB")
            if where == "disk":
                anonymous.append(record["anonymous_mb"])
    name = f"replay of {rows:,}"
    return [
        Row(name, "drawing 256 rows, ms (peer: in memory)", seconds["disk"], seconds["ram"], factor=0.5, digits=2),
        Row(name, "memory that is no file's, MB", anonymous, limit=ANON_LIMIT_MB, digits=0),
    ]


def measure(where: str, rows: int) -> dict[str, float]:
    import numpy as np
    from gymnasium import spaces

    from paceline.rollout.batch import Batch
    from paceline.rollout.replay import Replay
    from paceline.spaces import ActionCodec, ObservationCodec

    observation = ObservationCodec(spaces.Box(0, 255, (64, 64, 3), np.uint8))
    action = ActionCodec(spaces.Discrete(15))
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=ROOT) as folder:
        held = Replay(rows, 16, observation, action, on_disk=where == "disk")
        held.open(Path(folder))
        batch = Batch.empty(64, 16, observation, action)
        batch.obs[...] = rng.integers(256, size=batch.obs.shape, dtype=np.uint8)
        batch.valid[...] = True
        while len(held) < rows - 16 * 128:
            held.add(batch, continues=True)
        seconds = []
        for _ in range(DRAWS):
            began = time.perf_counter()
            held.sample(rng, ROWS, n_step=1, gamma=0.99)
            seconds.append(time.perf_counter() - began)
        status = Path("/proc/self/status").read_text()
    anonymous = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))
    return {"seconds": median(seconds), "anonymous_mb": anonymous / 1000}


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw from a replay in this process; print one JSON line.")
    parser.add_argument("--measure", choices=["ram", "disk"], required=True)
    parser.add_argument("--rows", type=int, default=100_000)
    options = parser.parse_args()
    print(json.dumps(measure(options.measure, options.rows)))


if __name__ == "__main__":
    main()
