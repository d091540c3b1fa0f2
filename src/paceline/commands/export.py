"""`paceline export`."""

from __future__ import annotations

from typing import Annotated, Literal

from paceline.commands.flags import Argument, Flag, Verb


class ExportVerb(Verb):
    """Write a trained agent to one file that runs without paceline."""

    target: Annotated[str, Argument("RUN|CHECKPOINT")]
    """A run directory, or a checkpoint in one."""
    format: Literal["onnx"] = "onnx"
    """Format of the file."""
    checkpoint: Annotated[str | None, Flag("best|last|STEP")] = None
    """Checkpoint of the run; default: best if there is one, else last."""
    output: Annotated[str | None, Flag("FILE", also=("-o",))] = None
    """Default: policy.onnx in the run directory."""

    def run(self) -> int:
        from paceline.export import export

        print(export(self.target, self.output, which=self.checkpoint).text())
        return 0
