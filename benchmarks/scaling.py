"""How the time of a dispatch+combine pair grows with ranks and tokens, beside all_to_all_single on gloo."""

from __future__ import annotations

from benchmarks.cpu_pair import add_options, report

STEPS = [1, 4, 16, 64, 256, 1024]


def main() -> None:
    options = add_options(__doc__)
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    options.set_defaults(tokens=STEPS, dtypes=["bfloat16"], repeats=9)
    report("scaling", options.parse_args())


if __name__ == "__main__":
    main()
