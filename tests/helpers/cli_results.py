"""What a command printed, and its exit code."""

from __future__ import annotations

import json


class Result:
    def __init__(self, code: int, stdout: str, stderr: str):
        self.code, self.stdout, self.stderr = code, stdout, stderr

    @property
    def json(self):
        return json.loads(self.stdout)
