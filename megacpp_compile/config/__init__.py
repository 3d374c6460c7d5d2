"""Settings as data: `Config`, the plans that are its values, and the glob dialect over module names."""
