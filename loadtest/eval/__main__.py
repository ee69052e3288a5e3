"""`python -m loadtest.eval`."""

import sys

from loadtest.eval.command import main

sys.exit(main())
