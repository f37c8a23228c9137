"""Configuration: the schema, and the loader that fills it from YAML files and overrides."""
