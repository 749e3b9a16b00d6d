"""`python -m dtensor_lm` is `dtensor-lm`."""

import sys

from dtensor_lm.cli import main

sys.exit(main())
