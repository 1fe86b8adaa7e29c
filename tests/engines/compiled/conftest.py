"""What a test compiles is compiled anew in the next one, as in the tests of level 2."""

from tests.fuse.conftest import fresh_dynamo

__all__ = ["fresh_dynamo"]
