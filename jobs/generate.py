"""Generate completions for every row of an input: `eagle-ray run` as a script, for `ray job submit`.

python jobs/generate.py -c configs/demo.yaml ray job submit --address http://127.0.0.1:8265
--working-dir . -- python jobs/generate.py -c configs/demo.yaml
"""

import sys

from eagle_ray.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["run", *sys.argv[1:]]))
