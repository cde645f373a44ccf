"""Real work for heads: one file a task, each with its data, model, loss, metric and prediction."""
