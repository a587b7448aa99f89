"""Compare methods on one's own prompts: `eagle-ray compare` without runs as a script, for `ray job submit`.

python jobs/evaluate.py
python jobs/evaluate.py -i prompts.jsonl -c job.yaml --methods eagle1,eagle2,ours --temperatures 0,1
"""

import sys

from eagle_ray.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
