"""A convection loop: fluid in a ring that is heated below and cooled above, by Lorenz's three equations.

This is the external program of the example. It knows nothing of reinforcement learning: it reads one request a line
from its standard input, answers each with one line, and ends with its input.

    {"begin": [1.0, 1.0, 20.0]}                           {"state": [1.0, 1.0, 20.0]}
    {"advance": {"heater": 28, "pump": 0, "time": 0.1}}   {"state": [2.1, …], "reversals": 0}
"""

from __future__ import annotations

import json
import sys

PRANDTL, GEOMETRY = 10.0, 8 / 3
STEP = 0.01

State = tuple[float, float, float]


def slopes(state: State, heater: float, pump: float) -> State:
    """x: how fast the fluid turns, and which way; y, z: how the temperature varies across the ring and up it."""
    x, y, z = state
    return PRANDTL * (y - x) + pump, x * (heater - z) - y, x * y - GEOMETRY * z


def advance(state: State, heater: float, pump: float) -> State:
    """One step of Runge and Kutta's method."""
    a = slopes(state, heater, pump)
    b = slopes(_along(state, a, STEP / 2), heater, pump)
    c = slopes(_along(state, b, STEP / 2), heater, pump)
    d = slopes(_along(state, c, STEP), heater, pump)
    x, y, z = (s + STEP / 6 * (k + 2 * m + 2 * n + o) for s, k, m, n, o in zip(state, a, b, c, d, strict=True))
    return x, y, z


def _along(state: State, slope: State, time: float) -> State:
    return state[0] + time * slope[0], state[1] + time * slope[1], state[2] + time * slope[2]


def main() -> None:
    state: State = (1.0, 1.0, 1.0)
    print("convection loop, ready", flush=True)  # as programs do; whoever asks passes over what is not an answer
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, object] = {}
        if "begin" in request:
            state = tuple(map(float, request["begin"]))
        else:
            order = request["advance"]
            reversals = 0
            for _ in range(round(order["time"] / STEP)):
                before = state[0]
                state = advance(state, order["heater"], order["pump"])
                reversals += before * state[0] < 0
            answer["reversals"] = reversals
        print(json.dumps({"state": state, **answer}), flush=True)


if __name__ == "__main__":
    main()
