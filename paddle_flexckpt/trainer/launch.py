"""Launch training scripts that know nothing of this library, in place of ``paddle.distributed.launch``.

python -m paddle_flexckpt.trainer.launch --nproc_per_node 2 script.py --save_checkpoint_format flex_checkpoint ...
Tested in tests/trainer/test_launched.py.
"""

from __future__ import annotations

import sys

from paddle_flexckpt.trainer import run


def main() -> None:
    """Launch :mod:`paddle_flexckpt.trainer.run` with the script as its argument."""
    from paddle.distributed.launch.context.args_envs import parse_args
    from paddle.distributed.launch.main import launch

    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        raise SystemExit(__doc__)
    parsed, _ = parse_args()
    place = len(sys.argv) - len(parsed.training_script_args) - 1
    sys.argv[place:place] = [run.__file__]
    launch()


if __name__ == "__main__":
    main()
