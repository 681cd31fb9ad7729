"""What a step of the learner costs beside a plain one and TRL's, by vocabulary and length."""
