"""Generation engines behind one interface, `vcpo_rollout.engines.engine.Engine`."""
