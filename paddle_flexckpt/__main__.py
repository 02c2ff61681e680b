"""``python -m paddle_flexckpt`` is ``flexckpt``."""

import sys

from paddle_flexckpt.cli.main import main

sys.exit(main())
