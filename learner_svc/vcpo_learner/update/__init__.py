"""One update on the tensor thread: from groups of judged trajectories to one AdamW step."""
