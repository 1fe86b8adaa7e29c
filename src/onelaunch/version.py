"""The version of the package; pyproject.toml reads it from here."""

VERSION = "1.0.0"
