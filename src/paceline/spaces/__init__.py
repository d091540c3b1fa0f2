"""Codecs between Gymnasium spaces and arrays: one array per observation for the network, one array per action."""

from paceline.spaces.actions import ActionCodec, ActionPart
from paceline.spaces.observations import MASK, Array, Channels, Leaf, ObservationCodec, fits, is_text
from paceline.spaces.space_json import codecs_from_json, codecs_to_json, space_from_json, space_to_json

__all__ = [
    "MASK",
    "ActionCodec",
    "ActionPart",
    "Array",
    "Channels",
    "Leaf",
    "ObservationCodec",
    "codecs_from_json",
    "codecs_to_json",
    "fits",
    "is_text",
    "space_from_json",
    "space_to_json",
]
