"""The version, written down once: pyproject.toml reads it from here."""

VERSION = "0.1.0"
