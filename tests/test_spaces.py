from __future__ import annotations

import json
import warnings
from collections import OrderedDict
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, concatenate, create_empty_array

import space_envs
from paceline.config import UserError
from paceline.spaces import ActionCodec, ObservationCodec, space_from_json, space_to_json

INF = float("inf")
I64 = np.iinfo(np.int64)
FLOAT = np.finfo(np.float32)

VECTORS: dict[str, spaces.Space[Any]] = {
    "box": spaces.Box(-1.0, 1.0, (3,), np.float32),
    "box of no dimension": spaces.Box(0.0, 1.0, (), np.float32),
    "box 2-D": spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "unbounded": spaces.Box(-INF, INF, (4,), np.float32),
    "half bounded": spaces.Box(np.array([0.0, -INF]), np.array([INF, 1.0]), dtype=np.float64),
    "integers": spaces.Box(-7, 9, (3,), np.int64),
    "bytes": spaces.Box(0, 255, (128,), np.uint8),
    "small grid": spaces.Box(0, 255, (5, 5, 3), np.uint8),
    "discrete": spaces.Discrete(4),
    "discrete from -2": spaces.Discrete(4, start=-2),
    "multidiscrete": spaces.MultiDiscrete([3, 1, 4]),
    "multidiscrete 2-D": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multibinary": spaces.MultiBinary(3),
    "multibinary 2-D": spaces.MultiBinary([2, 3]),
    "tuple": spaces.Tuple([spaces.Discrete(2, start=3), spaces.Box(-1.0, 1.0, (2,), np.float32)]),
    "nested": spaces.Dict(
        {
            "b": spaces.Tuple([spaces.MultiBinary(2), spaces.Dict({"z": spaces.Discrete(3), "y": spaces.Discrete(2)})]),
            "a": spaces.Box(-1.0, 1.0, (2, 2), np.float32),
            "c": spaces.MultiDiscrete([2, 2]),
        }
    ),
    "order kept": spaces.Dict(OrderedDict([("z", spaces.Discrete(2)), ("a", spaces.Box(0.0, 1.0, (1,), np.float32))])),
}
MIXED = spaces.Dict(
    {
        "camera": spaces.Box(0, 255, (8, 9, 3), np.uint8),
        "depth": spaces.Box(0.0, 1.0, (8, 8, 1), np.float32),
        "mode": spaces.Discrete(3),
        "state": spaces.Box(-1.0, 1.0, (2,), np.float32),
    }
)
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(5),
    "one choice": spaces.Discrete(1),
    "discrete from 3": spaces.Discrete(4, start=3),
    "multidiscrete": spaces.MultiDiscrete([3, 2]),
    "multidiscrete from": spaces.MultiDiscrete([3, 2], start=[-1, 5]),
    "multidiscrete 2-D": spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])),
    "multibinary": spaces.MultiBinary(4),
    "multibinary 2-D": spaces.MultiBinary([2, 2]),
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "box 2-D, each its own bounds": spaces.Box(
        np.array([[-2.0, 0.0], [3.0, -9.0]]), np.array([[2.0, 1.0], [5.0, 9.0]]), dtype=np.float64
    ),
    "box of no dimension": spaces.Box(-3.0, 1.0, (), np.float32),
    "unbounded": spaces.Box(-INF, INF, (3,), np.float32),
    "half bounded": spaces.Box(np.array([0.0, -INF]), np.array([INF, 1.0]), dtype=np.float64),
}
each_vector = pytest.mark.parametrize("space", VECTORS.values(), ids=VECTORS.keys())
each_action = pytest.mark.parametrize("space", ACTIONS.values(), ids=ACTIONS.keys())


def encode_one(space: spaces.Space[Any], value: Any) -> Any:
    codec = ObservationCodec(space)
    out = np.full(codec.shape, 77, codec.dtype)  # what was there before must not show through
    codec.encode_one(value, out)
    return out


def stacked(space: spaces.Space[Any], values: list[Any]) -> Any:
    return concatenate(space, values, create_empty_array(space, len(values)))


# -- observations ---------------------------------------------------------------------------------------------------


@each_vector
def test_a_vector_holds_the_leaves_in_order(space: spaces.Space[Any]) -> None:
    space.seed(3)
    codec = ObservationCodec(space)
    assert not codec.is_image and codec.dtype == np.float32
    assert codec.shape == (codec.size,) == (spaces.flatdim(space),)
    for _ in range(20):
        sample = space.sample()
        np.testing.assert_array_equal(
            encode_one(space, sample), np.asarray(spaces.flatten(space, sample), np.float32), strict=True
        )


@pytest.mark.parametrize(
    "space", [*VECTORS.values(), MIXED, spaces.Box(0, 255, (9, 8, 3), np.uint8)], ids=[*VECTORS, "mixed", "image"]
)
def test_a_batch_is_its_rows(space: spaces.Space[Any]) -> None:
    space.seed(4)
    samples = [space.sample() for _ in range(5)]
    codec = ObservationCodec(space)
    out = np.full((5, *codec.shape), 77, codec.dtype)
    codec.encode(stacked(space, samples), out)
    np.testing.assert_array_equal(out, np.stack([encode_one(space, sample) for sample in samples]), strict=True)


def test_numbers_written_out() -> None:
    np.testing.assert_array_equal(encode_one(spaces.Discrete(4, start=-2), 1), [0, 0, 0, 1])
    np.testing.assert_array_equal(encode_one(spaces.Discrete(4, start=-2), np.int64(-2)), [1, 0, 0, 0])
    np.testing.assert_array_equal(
        encode_one(spaces.MultiDiscrete(np.array([[2, 3], [1, 2]])), np.array([[1, 2], [0, 0]])),
        [0, 1, 0, 0, 1, 1, 1, 0],
    )
    shifted = spaces.MultiDiscrete([2, 3], start=[5, -1])
    np.testing.assert_array_equal(encode_one(shifted, np.array([6, -1])), [0, 1, 1, 0, 0])
    # Gymnasium sorts the keys of a plain dict, so `a` comes before `b`.
    nested = spaces.Dict({"b": spaces.Discrete(2), "a": spaces.Tuple([spaces.MultiBinary(2), spaces.Discrete(3)])})
    np.testing.assert_array_equal(
        encode_one(nested, {"b": 0, "a": (np.array([1, 0], np.int8), 2)}), [1, 0, 0, 0, 1, 1, 0]
    )


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((12, 10, 3), (3, 12, 10)),  # channels last
        ((3, 12, 10), (3, 12, 10)),  # channels first
        ((12, 10, 1), (1, 12, 10)),
        ((12, 10), (1, 12, 10)),  # grey
        ((4, 12, 10), (4, 12, 10)),  # grey, stacked
        ((4, 12, 10, 3), (12, 12, 10)),  # colour, stacked
        ((4, 3, 12, 10), (12, 12, 10)),  # colour, channels first, stacked
    ],
)
def test_images_come_out_channels_first(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    space = spaces.Box(0, 255, shape, np.uint8)
    codec = ObservationCodec(space)
    assert codec.is_image and not codec.is_plain
    assert codec.shape == expected and codec.dtype == np.uint8 and codec.leaves[0].scale == 255.0
    space.seed(1)
    image = space.sample()
    out = encode_one(space, image)
    for row, column in ((0, 0), (2, 7), (11, 9), (5, 1)):
        pixel: Any
        if len(shape) == 2:
            pixel = [image[row, column]]
        elif shape[-1] <= 3:
            pixel = image[..., row, column, :].ravel() if len(shape) == 4 else image[row, column]
        else:
            pixel = image[..., row, column].ravel()
        np.testing.assert_array_equal(out[:, row, column], pixel)


@pytest.mark.parametrize("shape", [(8, 16, 16), (16, 16, 8), (9, 10, 11), (4, 8, 16, 16), (32, 32, 8)])
def test_a_shape_that_fits_two_readings_needs_the_setting(shape: tuple[int, ...]) -> None:
    for dtype in (np.uint8, np.float32):
        space = spaces.Box(0, 255, shape, dtype)
        with pytest.raises(UserError, match=r"env.channels=last or env.channels=first"):
            ObservationCodec(space)
        *stack, a, b, c = shape
        frames = stack[0] if stack else 1
        assert ObservationCodec(space, "last").shape == (frames * c, a, b)
        assert ObservationCodec(space, "first").shape == (frames * a, b, c)
        image = space.sample()
        for channels in ("first", "last"):
            codec = ObservationCodec(space, channels)
            out = np.zeros(codec.shape, codec.dtype)
            codec.encode_one(image, out)
            pixel = image[..., 2, 3] if channels == "first" else image[..., 2, 3, :]
            np.testing.assert_array_equal(out[:, 2, 3], pixel.ravel())


def test_the_setting_must_agree_with_a_shape_that_fits_one_reading() -> None:
    assert ObservationCodec(spaces.Box(0, 255, (12, 10, 3), np.uint8), "last").shape == (3, 12, 10)
    with pytest.raises(UserError, match=r"env.channels=first: observation space .* channels last"):
        ObservationCodec(spaces.Box(0, 255, (12, 10, 3), np.uint8), "first")
    with pytest.raises(UserError, match=r"env.channels=last is for images"):
        ObservationCodec(spaces.Box(0, 1, (3,)), "last")


def test_an_observation_of_another_shape_is_not_read_as_one_of_this() -> None:
    space = spaces.Dict({"camera": spaces.Box(0, 255, (12, 10, 3), np.uint8), "speed": spaces.Box(0, 1, (2, 3))})
    sample = space.sample()
    with pytest.raises(ValueError, match=r"\(3, 12, 10\)"):
        encode_one(space, {**sample, "camera": sample["camera"].transpose(2, 0, 1)})
    with pytest.raises(ValueError, match=r"\(3, 2\)"):
        encode_one(space, {**sample, "speed": sample["speed"].T})
    same = encode_one(space, {**sample, "speed": sample["speed"][None]})  # no other reading
    np.testing.assert_array_equal(same, encode_one(space, sample))


@pytest.mark.parametrize("shape", [(7, 12, 3), (7, 12), (5, 5, 3), (40, 5, 5), (33, 12, 40)])
def test_what_is_too_small_or_too_deep_for_an_image_is_a_vector(shape: tuple[int, ...]) -> None:
    codec = ObservationCodec(spaces.Box(0, 255, shape, np.uint8))
    assert not codec.images and codec.shape == (int(np.prod(shape)),)


def test_an_image_of_floats_keeps_its_numbers() -> None:
    codec = ObservationCodec(spaces.Box(0.0, 1.0, (8, 8, 3), np.float32))
    assert codec.is_image and codec.dtype == np.float32 and codec.leaves[0].scale == 1.0
    assert not ObservationCodec(spaces.Box(0.0, 1.0, (8, 8), np.float32)).images  # a matrix is not an image


def test_an_image_in_a_dict_alone_is_an_image() -> None:
    space = spaces.Dict({"pixels": spaces.Box(0, 255, (8, 9, 3), np.uint8)})
    space.seed(0)
    sample = space.sample()
    np.testing.assert_array_equal(encode_one(space, sample), sample["pixels"].transpose(2, 0, 1), strict=True)


def test_images_among_a_vector_lie_flat_in_it() -> None:
    MIXED.seed(0)
    sample = MIXED.sample()
    sample["mode"] = np.int64(1)
    codec = ObservationCodec(MIXED)
    assert [leaf.shape for leaf in codec.images] == [(3, 8, 9), (1, 8, 8)]
    assert [leaf.scale for leaf in codec.images] == [255.0, 1.0]
    expected = [sample["camera"].transpose(2, 0, 1).ravel(), sample["depth"].ravel(), [0, 1, 0], sample["state"]]
    np.testing.assert_array_equal(encode_one(MIXED, sample), np.concatenate(expected).astype(np.float32), strict=True)


@pytest.mark.parametrize(
    ("space", "named"),
    [
        (spaces.Text(5), "has only Text, .*: give numbers"),
        (spaces.Tuple([spaces.Text(5), spaces.Text(5)]), "has only Text"),
        (spaces.Sequence(spaces.Discrete(2)), "is a Sequence, .*: pad it to a Box of the greatest length in the env"),
        (spaces.Graph(spaces.Discrete(2), None), "is a Graph, .*: give its nodes and edges as Boxes"),
        (
            spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Sequence(spaces.Box(0, 1)), "c": spaces.Text(3)}),
            r"\['b'\] is a Sequence.*filter_keys: \[a, c\].*, or pad it",
        ),
        (spaces.Discrete(2_000_000_000), "2,000,000,000 values"),
        (spaces.Box(0.0, 1.0, (0,), np.float32), "empty"),
        (spaces.Dict({}), "empty"),
    ],
    ids=str,
)
def test_other_observations_are_refused(space: spaces.Space[Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        ObservationCodec(space)


def test_text_is_dropped() -> None:
    box = spaces.Box(-1.0, 1.0, (2,), np.float32)
    space = spaces.Dict({"goal": spaces.Text(9), "state": spaces.Tuple([spaces.Text(3, min_length=0), box])})
    codec = ObservationCodec(space)
    assert (codec.size, [leaf.path for leaf in codec.leaves]) == (2, [("state", 1)])
    assert codec.note.startswith("observation['goal'], observation['state'][0] are text, which the policy does not see")
    given = {"goal": "north", "state": ("", np.array([0.5, -1.0], np.float32))}
    np.testing.assert_array_equal(encode_one(space, given), [0.5, -1.0])
    back = space_from_json(json.loads(json.dumps(space_to_json(space))))
    assert back == space and ObservationCodec(back).leaves == codec.leaves
    assert ObservationCodec(box).note == ""


def test_text_of_a_space_that_a_package_made_is_dropped_and_its_wrapper_named() -> None:
    class MissionSpace(spaces.Space[str]):
        """As MiniGrid has it."""

    MissionSpace.__module__ = "minigrid.core.mission"
    codec = ObservationCodec(spaces.Dict({"mission": MissionSpace(dtype=str), "way": spaces.Discrete(4)}))
    assert codec.size == 4
    assert codec.note == (
        "observation['mission'] is text, which the policy does not see: set "
        "env.wrappers=[minigrid.wrappers:DictObservationSpaceWrapper] if it needs that"
    )
    back = space_from_json(json.loads(json.dumps(space_to_json(codec.space))))
    assert ObservationCodec(back).leaves == codec.leaves


def test_two_images_of_bytes_and_of_floats_switches_and_offsets_written_out() -> None:
    space = spaces.Dict(
        {
            "a": spaces.Box(0, 255, (8, 8), np.uint8),
            "b": spaces.Box(-1.0, 1.0, (2, 9, 9), np.float32),
            "c": spaces.MultiBinary([1, 2]),
            "d": spaces.MultiDiscrete([2, 3], start=[5, -1]),
            "e": spaces.Tuple([spaces.Discrete(3, start=-1)]),
        }
    )
    codec = ObservationCodec(space)
    assert [(leaf.kind, leaf.shape, leaf.scale) for leaf in codec.images] == [
        ("image", (1, 8, 8), 255.0),
        ("image", (2, 9, 9), 1.0),
    ]
    given = {
        "a": np.full((8, 8), 200, np.uint8),
        "b": np.full((2, 9, 9), -0.5, np.float32),
        "c": np.array([[0, 1]], np.int8),
        "d": np.array([6, -1]),
        "e": (1,),
    }
    row = encode_one(space, given)
    np.testing.assert_array_equal(row[:64], 200)
    np.testing.assert_array_equal(row[64:226], -0.5)
    np.testing.assert_array_equal(row[226:], [0, 1, 0, 1, 1, 0, 0, 0, 0, 1])


# -- actions --------------------------------------------------------------------------------------------------------


@each_action
@pytest.mark.parametrize("squash", [False, True])
def test_decode_undoes_encode(space: spaces.Space[Any], squash: bool) -> None:
    if squash and not (isinstance(space, spaces.Box) and space.is_bounded()):
        return
    space.seed(9)
    codec = ActionCodec(space, squash=squash)
    samples = [space.sample() for _ in range(7)]
    encoded = np.stack([codec.encode(sample) for sample in samples])
    assert encoded.shape == (7, *codec.shape) and encoded.dtype == codec.dtype
    decoded, split = codec.decode(encoded), codec.split(encoded)
    assert len(split) == 7
    for row, one, sample in zip(decoded, split, samples, strict=True):
        assert space.contains(np.asarray(row)) and space.contains(np.asarray(one))
        tolerance = 1e-5 if codec.is_continuous else 0
        np.testing.assert_allclose(row, sample, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(one, sample, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["discrete", "discrete from 3", "multidiscrete from", "multidiscrete 2-D"])
def test_every_index_is_an_action_and_each_another(name: str) -> None:
    space = ACTIONS[name]
    codec = ActionCodec(space)
    grid = np.stack(np.meshgrid(*[np.arange(n) for n in codec.nvec], indexing="ij"), -1).reshape(-1, len(codec.nvec))
    actions = codec.split(grid)
    assert all(space.contains(action) for action in actions)
    assert len({np.asarray(action).tobytes() for action in actions}) == np.prod(codec.nvec)
    assert codec.num_outputs == sum(codec.nvec)


def test_actions_written_out() -> None:
    assert ActionCodec(spaces.Discrete(3)).split(np.array([[2], [0]])) == [2, 0]
    assert ActionCodec(spaces.Discrete(3, start=-1)).split(np.array([[2], [0]])) == [1, -1]
    two = ActionCodec(spaces.MultiDiscrete(np.array([[2, 3], [4, 5]])))
    np.testing.assert_array_equal(two.decode(np.array([[1, 2, 3, 4]])), [[[1, 2], [3, 4]]])
    binary = ActionCodec(spaces.MultiBinary(3)).decode(np.array([[1, 0, 1]]))
    np.testing.assert_array_equal(binary, np.array([[1, 0, 1]], np.int8), strict=True)


def test_a_unit_is_half_the_width_and_what_is_beyond_is_clipped() -> None:
    codec = ActionCodec(spaces.Box(np.array([2.0, -1.0]), np.array([6.0, 1.0]), dtype=np.float64))
    np.testing.assert_allclose(
        codec.decode(np.array([[0.0, 0.0], [-0.5, 0.25], [9, -9]])), [[4.0, 0.0], [3.0, 0.25], [6.0, -1.0]]
    )


def test_one_bound_is_at_minus_one_or_one_and_the_other_side_is_open() -> None:
    space = spaces.Box(np.array([100.0, -INF, -INF, -1.0]), np.array([INF, -5.0, INF, 3.0]), dtype=np.float64)
    codec = ActionCodec(space)
    np.testing.assert_array_equal(codec.bounded, [False, False, False, True])
    np.testing.assert_array_equal(codec.decode(np.array([[0.0] * 4])), [[101, -6, 0, 1]])
    np.testing.assert_array_equal(codec.decode(np.array([[-1.0] * 4])), [[100, -7, -1, -1]])
    np.testing.assert_array_equal(codec.decode(np.array([[1.0] * 4])), [[102, -5, 1, 3]])
    np.testing.assert_array_equal(codec.decode(np.array([[-3.0] * 4])), [[100, -9, -3, -1]])
    np.testing.assert_array_equal(codec.decode(np.array([[3.0] * 4])), [[104, -5, 3, 3]])
    np.testing.assert_array_equal(codec.encode(np.array([103.0, -8.0, 4.0, 2.0])), np.float32([2, -2, 4, 0.5]))


def test_the_units_of_a_far_bound_stay_1() -> None:
    codec = ActionCodec(spaces.Box(1e17, INF, (1,), np.float64))
    assert codec.scale == [1.0] and codec.center == [1e17]


@pytest.mark.parametrize(
    ("space", "center", "scale"),
    [
        (spaces.Box(0.0, FLOAT.max, (1,), np.float32), 1, 1),
        (spaces.Box(0, np.iinfo(np.int32).max, (1,), np.int32), 1, 1),
        (spaces.Box(np.iinfo(np.int32).min, 9, (1,), np.int32), 8, 1),
        (spaces.Box(0, 10, (1,), np.uint32), 5, 5),
        (spaces.Box(0, 255, (1,), np.uint8), 127.5, 127.5),
        (spaces.Box(-10.0, 1.0, (1,), np.float32), -4.5, 5.5),
        (spaces.Box(4.0, 4.5, (1,), np.float32), 4.25, 0.25),
    ],
    ids=str,
)
def test_center_and_scale_written_out(space: spaces.Box, center: float, scale: float) -> None:
    codec = ActionCodec(space)
    assert (codec.center[0], codec.scale[0]) == (center, scale)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 3), (1, 2, 3, 2)], ids=str)
def test_a_box_of_any_shape(shape: tuple[int, ...]) -> None:
    size = int(np.prod(shape))
    low = -np.arange(1.0, size + 1).reshape(shape)  # each number its own bounds: -k to 3k
    space = spaces.Box(low, -3 * low, shape, np.float64)
    codec = ActionCodec(space)
    assert codec.shape == (size,)
    decoded = codec.decode(np.stack([np.zeros(size), np.full(size, -1.0), np.full(size, 9.0)]))
    for row, wanted in zip(decoded, (-low, low, -3 * low), strict=True):
        np.testing.assert_array_equal(row, wanted)
        assert row.shape == shape and space.contains(np.asarray(row))
    [middle] = codec.split(np.zeros((1, size)))
    np.testing.assert_array_equal(codec.encode(middle), np.zeros(size, np.float32))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-FLOAT.max, FLOAT.max, (2,), np.float32),
        spaces.Box(-1e20, 1e20, (2,), np.float64),
        spaces.Box(I64.min, I64.max, (2,), np.int64),
        spaces.Box(np.iinfo(np.int32).min, np.iinfo(np.int32).max, (2,), np.int32),
    ],
    ids=str,
)
def test_bounds_too_large_to_scale_to_are_none(space: spaces.Box) -> None:
    codec = ActionCodec(space)
    given = np.array([[3.0, 7.0]], np.float32)
    np.testing.assert_allclose(codec.decode(given), given)
    with pytest.raises(UserError, match="finite action bounds"):
        ActionCodec(space, squash=True)


def test_squashing_is_tanh_into_the_bounds() -> None:
    codec = ActionCodec(spaces.Box(np.float32(2.0), np.float32(6.0), (1,)), squash=True)
    u = np.array([[-30.0], [-1.0], [0.0], [0.5], [30.0]], np.float32)
    np.testing.assert_allclose(codec.decode(u), 4 + 2 * np.tanh(u), rtol=1e-6)
    assert np.isfinite(codec.encode(np.array([6.0], np.float32))).all()


@pytest.mark.parametrize(
    ("space", "squash", "named"),
    [
        (spaces.Tuple([spaces.Dict({"t": spaces.Text(4)})]), False, r"action space\[0\]\['t'\] is a Text"),
        (spaces.Dict({}), False, "empty"),
        (spaces.Tuple([spaces.Discrete(900_000), spaces.Discrete(900_000)]), False, "1,800,000 values"),
        (space_envs.ACTIONS["choices"], True, "squash is for continuous"),
        (space_envs.ACTIONS["numbers"], True, "finite"),
        (spaces.Text(4), False, "Text"),
        (spaces.Box(-1, 1, (0,)), False, "empty"),
        (spaces.Discrete(2_000_000_000), False, "2,000,000,000 values"),
        (spaces.Discrete(2), True, "squash is for continuous"),
        (spaces.Box(-INF, INF, (2,), np.float32), True, "finite"),
        (ACTIONS["half bounded"], True, "finite"),
    ],
    ids=str,
)
def test_other_actions_are_refused(space: spaces.Space[Any], squash: bool, named: str) -> None:
    with pytest.raises(UserError, match=named):
        ActionCodec(space, squash=squash)


def assert_equal(one: Any, other: Any) -> None:
    """Also in structure and types."""
    assert type(one) is type(other), (one, other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        one, other = tuple(one.values()), tuple(other.values())
    if isinstance(one, tuple | list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_equal(left, right)
    else:
        np.testing.assert_array_equal(one, other, strict=True)


def test_nested_choices_written_out() -> None:
    codec = ActionCodec(space_envs.ACTIONS["choices"])
    assert codec.nvec == (2, 2, 3, 2, 4)  # Gymnasium sorts the keys: grip, move
    rows = np.array([[1, 0, 2, 1, 3], [0, 1, 0, 0, 0]])
    grip = np.array([[1, 0], [0, 1]], np.int8)
    places = np.array([[[1, 2]], [[0, -1]]])
    assert_equal(codec.decode(rows), {"grip": grip, "move": (np.array([3, 1]), places)})
    assert_equal(
        codec.split(rows), [{"grip": grip[0], "move": (3, places[0])}, {"grip": grip[1], "move": (1, places[1])}]
    )


def test_nested_numbers_written_out() -> None:
    codec = ActionCodec(space_envs.ACTIONS["numbers"])
    assert codec.dim == 4 and codec.bounded.tolist() == [True, True, True, False]
    # -2 to 2, 0 to 1, the gear from 0 to 8, the valve from 100 on
    [first, last] = codec.split(np.array([[0.5, 0.0, 0.0, 0.5], [-7.0, 1.0, 9.0, -9.0]], np.float32))
    assert_equal(first[0], np.array([[1.0], [0.5]]))
    assert_equal(first[1], {"gear": np.array([4], np.int32), "valve": np.float32(101.5)})
    assert_equal(last[0], np.array([[-2.0], [1.0]]))
    assert_equal(last[1], {"gear": np.array([8], np.int32), "valve": np.float32(100)})


@pytest.mark.parametrize("name", space_envs.ACTIONS)
def test_nested_actions_come_back(name: str) -> None:
    space = space_envs.ACTIONS[name]
    codec = ActionCodec(space)
    space.seed(4)
    samples = [space.sample() for _ in range(6)]
    encoded = np.stack([codec.encode(sample) for sample in samples])
    assert encoded.shape == (6, *codec.shape) and encoded.dtype == codec.dtype
    for one, sample in zip(codec.split(encoded), samples, strict=True):
        np.testing.assert_allclose(space_envs.flat(one), space_envs.flat(sample), rtol=1e-5, atol=1e-5)
    assert batch_space(space, 6).contains(codec.decode(encoded))

    given = codec.split(encoded)
    for one, same in zip(given, codec.unpack(codec.pack(given)), strict=True):
        assert_equal(one, same)  # exactly
    assert codec.unpack(codec.pack([])) == []
    back = space_from_json(json.loads(json.dumps(space_to_json(space))))
    assert back == space
    for one, same in zip(given, ActionCodec(back).split(encoded), strict=True):
        assert_equal(one, same)


# -- JSON -----------------------------------------------------------------------------------------------------------

EXTREMES = {
    "int64 limits": spaces.Box(I64.min, I64.max, (2,), np.int64),
    "int64, each its own": spaces.Box(np.array([0, 2**60 + 1]), np.array([I64.max, 2**62 + 3]), dtype=np.int64),
    "float32 limits": spaces.Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (2,), np.float32),
    "cartpole": gymnasium.make("CartPole-v1").observation_space,
}


@pytest.mark.parametrize(
    "space",
    [*VECTORS.values(), MIXED, *ACTIONS.values(), *EXTREMES.values()],
    ids=[*VECTORS, "mixed", *(f"action {name}" for name in ACTIONS), *EXTREMES],
)
def test_a_space_survives_json(space: spaces.Space[Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = space_from_json(json.loads(json.dumps(space_to_json(space))))
    assert back == space
    assert (back.shape, back.dtype) == (space.shape, space.dtype)
    codec, same = ObservationCodec(space), ObservationCodec(back)
    assert same.leaves == codec.leaves


def test_the_order_of_a_dict_survives_json() -> None:
    space = spaces.Dict(OrderedDict([("z", spaces.Discrete(2)), ("a", spaces.Discrete(3))]))
    back = space_from_json(json.loads(json.dumps(space_to_json(space))))
    assert isinstance(back, spaces.Dict) and list(back.spaces) == ["z", "a"]


def test_bounds_that_are_all_the_same_are_one_number() -> None:
    assert len(json.dumps(space_to_json(spaces.Box(0, 255, (210, 160, 3), np.uint8)))) < 200
