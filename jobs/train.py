"""Train a draft head: `eagle-ray train` as a script, for `ray job submit`.

python jobs/train.py -c configs/train_demo.yaml ray job submit --address http://127.0.0.1:8265
--working-dir . -- python jobs/train.py -c configs/train_demo.yaml
"""

import sys

from eagle_ray.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
