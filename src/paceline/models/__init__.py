"""Networks and the policy that makes actions of them."""
