"""The command line, one file per verb. A verb imports what it needs when it runs: `paceline --help` answers at once."""

import time

BEGAN = time.perf_counter()
"""About when the process began: the time of a run includes its imports."""
