"""Generation engines behind one seam, `vcpo_rollout.engines.engine.Engine`."""
