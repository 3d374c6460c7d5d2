"""Loops that other packages train with: transformers' `Trainer` (`integrations.transformers`), or one's own
(`integrations.training`)."""
