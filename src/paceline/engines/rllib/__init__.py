"""Ray RLlib's algorithms under paceline's loop."""
