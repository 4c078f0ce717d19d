"""`python -m intellect`: the same as the command `intellect`, for an interpreter whose scripts are not on the path."""

from intellect.cli import main

if __name__ == "__main__":
    main()
