"""Run `python -m eagle_ray.cli` as the command eagle-ray."""

from eagle_ray.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
