"""Many runs of one kind, made and read together."""
