"""What a score is good for; any callable `(y, t) -> y` is one."""
