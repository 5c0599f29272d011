"""`python -m resilient_run` is `resilient-run`."""

import sys

from resilient_run.cli import main

sys.exit(main())
