"""Loops that other packages train with: transformers' `Trainer` (`integrations.transformers`), torchtitan's
GraphTrainer (`integrations.torchtitan`), or one's own (`integrations.training`)."""
