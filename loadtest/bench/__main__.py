"""`python -m loadtest.bench`."""

import sys

from loadtest.bench.command import main

sys.exit(main())
