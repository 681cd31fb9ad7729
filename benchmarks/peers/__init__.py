"""The same training by TRL's GRPOTrainer and by this project, side by side on one machine."""
