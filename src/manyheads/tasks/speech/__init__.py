"""Speech: the task, its models, synthetic recordings, strings of words."""
